"""Plans of models whose layers pass on a state from token to token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lt_tiled import (
    ActivationCheckpointing,
    SequenceParallel,
    TiledDDPStrategy,
    TiledModelParallelStrategy,
    TiledSingleDeviceStrategy,
    Tiling,
)
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from lt_tiled.planner.kernels import _KERNELS
from lt_tiled.planner.search import plan
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


@pytest.mark.table("8-bamba")
@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("size", [1, 8])
def test_a_million_tokens(model: str, size: int) -> None:
    """On a GPU, a rule is one kernel: a plan makes hardly more allocations for a million tokens than for some
    thousand, of memory that grows with the tokens.
    """
    with torch.device("meta"):
        module = CausalLM(config={**CONFIGS[model], "num_attention_heads": 8, "num_key_value_heads": 8})
    policy = SequenceParallel(size) if size > 1 else None
    made = TiledModelParallelStrategy(tiling=TILES, activation_checkpointing=True, sequence_parallel=policy)
    job = make_job(module, TextFiles(seq_len=512), {"strategy": made, "accelerator": "gpu", "devices": 8})
    short, long = (plan(job, tokens, replace(job.settings, loss=3)).simulation for tokens in (2**16, 2**20))
    assert len(long.allocations) < 1.2 * len(short.allocations)  # tiles of a second size
    assert long.peak == pytest.approx(16 * short.peak, rel=0.05)
    assert long.flops > 16 * short.flops  # attention


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_chunk_scan() -> None:
    """Mamba 2 saves its output and a sum for each step, and holds the states of its chunks in float32."""
    x, groups = numbers(1, 1024, 64, 64), numbers(1, 1024, 8, 128)
    kernel = _KERNELS["mamba2_chunk_scan"]({"hidden_states": x, "B": groups, "C": groups, "chunk_size": 128})
    states = 8 * 64 * 64 * 128 * 4
    assert kernel.output
    assert kernel.saved == 1024 * 64 * 4
    assert kernel.forward == kernel.saved + states // 2 + states
    assert kernel.backward >= 2 * states + 2 * states // 2


@pytest.mark.parametrize("channels", [False, True], ids=["gated delta rule", "KDA"])
def test_delta_rule(channels: bool) -> None:
    """A delta rule saves normalized queries and keys, the sums of its decay, and one or two matrices for each chunk."""
    keys, values, beta = numbers(1, 1024, 16, 128), numbers(1, 1024, 32, 64), numbers(1, 1024, 32)
    decay = numbers(1, 1024, 32, 128) if channels else beta
    given = {"query": keys, "key": keys, "value": values, "g": decay, "beta": beta, "use_qk_l2norm_in_kernel": True}
    kernel = _KERNELS["torch_chunk_gated_delta_rule"](given)
    matrices = 1024 * 32 * 64 * 2
    norms = 2 * keys.nbytes + 2 * 1024 * 32 * 4
    assert kernel.saved == 4 * decay.numel() + (2 if channels else 1) * matrices + norms
    assert kernel.replaced == ("query", "key")
