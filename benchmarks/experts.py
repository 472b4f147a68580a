"""What tiles of experts cost: ``python -m benchmarks --only experts``.

Mixtures of experts of released models, from their configurations and without weights: their tiles, the bytes of
gradient sums that these read and write in a backward pass, and the time of that relative to their arithmetic. The
figures are computed, with the bandwidth and the FLOP/s of :func:`lt_tiled.tiling.cut.SUM_TOKENS`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.harness import Options, Table, marked
from lt_tiled import Tiling
from lt_tiled.modules.feed_forward import find_sizes
from lt_tiled.tiling.cut import MAX_SUMS_SHARE, SUM_TOKENS, tile_bounds

TOKENS = 131072


def mixtures() -> dict[str, nn.Module]:
    """Return a layer's mixture of each model, on the meta device."""
    with torch.device("meta"):
        return {
            "Mixtral 8x7B": MixtralSparseMoeBlock(MixtralConfig()),
            "Qwen3 30B A3B": Qwen3MoeSparseMoeBlock(Qwen3MoeConfig()),
            "GPT-OSS 20B": GptOssMLP(GptOssConfig(num_local_experts=32)),
        }


def experts(options: Options) -> list[Table]:
    """Return the tiles of ``num_shards="auto"``."""
    headings = ["", "tiles", "tokens of a tile", "sums of a layer [GB]", "of the arithmetic"]
    table = Table(f"Gradient sums of experts on {TOKENS} tokens, in each backward pass", headings)
    for name, module in mixtures().items():
        sizes = find_sizes(module)
        assert sizes is not None
        bounds = tile_bounds(Tiling(), TOKENS, sizes.hidden, sizes)
        share = SUM_TOKENS / TOKENS * sizes.summed / sizes.used * len(bounds)
        summed = f"{8 * sizes.summed * len(bounds) / 1e9:.1f}"
        table.add(name, str(len(bounds)), str(bounds[0][1]), summed, marked(f"{share:.1%}", share <= MAX_SUMS_SHARE))
    return [table]
