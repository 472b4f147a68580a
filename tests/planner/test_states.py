"""Plans of models whose layers pass on a state from token to token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from lt_tiled import (
    ActivationCheckpointing,
    SequenceParallel,
    TiledDDPStrategy,
    TiledSingleDeviceStrategy,
    Tiling,
)
from lt_tiled.planner.fake import without_memory
from tests.planner.runs import TWO, measured, predicted
from tests.world import World

pytestmark = pytest.mark.slow

NEAR = 0.02
TILES = Tiling(3, self_check=False)
_DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
_MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 64}
_CONV = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "block_ff_dim": 192}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "lfm2": _CONV,
}
CONFIGS = {name: {**TWO, "model_type": name, "pad_token_id": 0, **fields} for name, fields in FIELDS.items()}
"""A gated delta rule, Mamba 2 and a convolution alone, each with a layer of attention."""
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "alone, attention kept": (1, {"keep": "attention"}),
    "alone, output kept": (1, {"keep": "attention_output"}),
    "2 ranks, attention kept": (2, {"keep": "attention"}),
    "2 ranks, output kept": (2, {"keep": "attention_output"}),
    "2 ranks, exchange kept": (2, {"keep": "exchange"}),
    "4 ranks": (4, {}),
    "4 ranks, offloaded": (4, {"offload": "disk"}),
}


def strategy(name: str) -> Any:
    size, fields = RUNS[name]
    policies = {"tiling": TILES, "activation_checkpointing": ActivationCheckpointing(**fields)}
    if size == 1:
        return TiledSingleDeviceStrategy(**policies)
    return TiledDDPStrategy(sequence_parallel=SequenceParallel(size, self_check=False), **policies)


def of(model: str, name: str) -> int:
    return measured(partial(strategy, name), config=CONFIGS[model], loss=3)


@pytest.mark.table("bamba-(alone|4 ranks)|lfm2-2 ranks, attention kept")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("model", CONFIGS)
def test_prediction(model: str, name: str, request: pytest.FixtureRequest) -> None:
    """For each kind of layer, alone and shared, the prediction is within 2 % of what a real step holds.

    On CPUs both compute the rules in torch.
    """
    alone = RUNS[name][0] == 1
    world: World | None = None if alone else request.getfixturevalue("four_ranks")
    real = of(model, name) if world is None else min(world(of, model, name))
    assert predicted(partial(strategy, name), 1 if alone else 4, config=CONFIGS[model], loss=3) == pytest.approx(
        real, rel=NEAR
    )


def test_installed_kernels() -> None:
    """A plan runs the torch code of a function of which transformers found a kernel in another package."""

    def sqrt(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()

    function = use_kernel_func_from_hub_with_fallback("sqrt", "math")(sqrt)
    assert isinstance(function(torch.ones(1)), float)
    with without_memory(nn.Identity()):
        assert function(torch.ones(2)).shape == (2,)
