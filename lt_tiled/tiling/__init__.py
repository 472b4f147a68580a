"""Token-wise modules, and losses, tile by tile."""

from lt_tiled.tiling.loss import TiledLinearCrossEntropy, tiled_linear_cross_entropy, tiled_token_logprobs
from lt_tiled.tiling.modules import tile, untile

__all__ = ["TiledLinearCrossEntropy", "tile", "tiled_linear_cross_entropy", "tiled_token_logprobs", "untile"]
