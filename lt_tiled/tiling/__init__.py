"""Token-wise modules, tile by tile."""

from lt_tiled.tiling.modules import tile, untile

__all__ = ["tile", "untile"]
