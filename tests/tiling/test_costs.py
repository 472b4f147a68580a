"""What tiling costs and saves, in exact figures: FLOPs, calls of the forward, live bytes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import tile
from tests.meters import LiveBytes, flops, peak_bytes
from tests.models import Block, GatedMLP, PlainMLP
from tests.parity import randn

TOKENS, HIDDEN, WIDE, TILES = 512, 32, 96, 8
TILE = TOKENS // TILES
PRINT = 4 * TOKENS
"""The bytes of the fingerprints of a call: a number for each of its tokens."""
PRINT_OF_WEIGHT = 4 * HIDDEN
"""That of its last projection's weight: a number for each of its rows."""


def step(module: nn.Module, x: Tensor, checkpointed: bool = False) -> None:
    y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
    torch.autograd.backward(y, torch.ones_like(y))


@pytest.mark.parametrize("mlp", [GatedMLP, PlainMLP])
def test_checkpointed_block_costs_nothing_more(mlp: type[nn.Module]) -> None:
    """FLOPs of a checkpointed block with its MLP tiled are 1.00 times those of the same block untiled, from the first
    step on.
    """
    block, x = Block(HIDDEN, WIDE, mlp), randn(1, TOKENS, HIDDEN)
    untiled = flops(lambda: step(block, x, checkpointed=True))
    tile(block.mlp, num_shards=TILES, self_check=False)
    assert [flops(lambda: step(block, x, checkpointed=True)) for _ in range(2)] == [untiled] * 2


@pytest.mark.parametrize(("mlp", "ratio"), [(GatedMLP, 11 / 9), (PlainMLP, 7 / 6)])
def test_cost_without_checkpointing(mlp: type[nn.Module], ratio: float) -> None:
    """Without checkpointing the MLP's FLOPs grow by the recompute of all projections but the last: 11/9 for a gated
    MLP.
    """
    module, x = mlp(HIDDEN, WIDE), randn(1, TOKENS, HIDDEN)
    untiled = flops(lambda: step(module, x))
    tile(module, num_shards=TILES, self_check=False)
    assert [flops(lambda: step(module, x)) / untiled for _ in range(2)] == [pytest.approx(ratio)] * 2


def test_lora_costs_next_to_nothing_more() -> None:
    """With LoRA on a frozen base a checkpointed block computes the last small product once more for each token."""
    from peft import LoraConfig, inject_adapter_in_model

    block, x = Block(HIDDEN, WIDE).requires_grad_(False), randn(1, TOKENS, HIDDEN)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["gate", "up", "down"]), block.mlp)
    untiled = flops(lambda: step(block, x, checkpointed=True))
    tile(block.mlp, num_shards=TILES, self_check=False)
    assert flops(lambda: step(block, x, checkpointed=True)) == untiled + 2 * TOKENS * 4 * HIDDEN


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks(dtype: torch.dtype) -> None:
    """The forward holds the output, and of one tile the three widened tensors that the module itself holds at once;
    forward and backward the output, both their gradients and the input's, one tile, and the gradient sums.
    """
    module = tile(GatedMLP(HIDDEN, WIDE).to(dtype), num_shards=TILES, self_check=False)
    x = randn(1, TOKENS, HIDDEN, dtype=dtype)
    element, hidden_states, one_tile = x.element_size(), TOKENS * HIDDEN, 3 * TILE * WIDE
    with torch.no_grad():
        peak = peak_bytes(lambda: module(x))
    assert peak == (hidden_states + one_tile) * element  # act(gate), up, their product
    step(module, x)
    x.grad = None
    module.zero_grad(set_to_none=True)
    peak = peak_bytes(lambda: step(module, x))
    # Of one tile: gate, act(gate) and up are saved; then the gradients of their product and of two of them.
    tensors = (3 * hidden_states + 2 * one_tile) * element
    sums = 3 * HIDDEN * WIDE * 4  # one for each weight, in float32
    prints = 2 * (PRINT + PRINT_OF_WEIGHT)  # of the forward pass and of the recompute
    assert peak <= tensors + sums + prints + 64


def test_forward_keeps_nothing_but_the_input() -> None:
    """Between forward and backward a tiled call keeps its input (which the caller made) and its output alive, and no
    more but a fingerprint.
    """
    module, x = tile(GatedMLP(HIDDEN, WIDE), num_shards=TILES, self_check=False), randn(1, TOKENS, HIDDEN)
    with LiveBytes() as meter:
        y = module(x)
        assert meter.now == y.nbytes + PRINT + PRINT_OF_WEIGHT
        del y
        assert meter.now == 0


@pytest.mark.self_checks
def test_nothing_is_left_of_a_step() -> None:
    """After the first step, whose self-check makes a graph that nobody runs backward, no byte of it is alive, also
    without Python's garbage collection; nor after others.
    """
    module = tile(GatedMLP(HIDDEN, WIDE), num_shards=4)
    x = torch.ones(1, 64, HIDDEN, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with LiveBytes() as meter:
                torch.autograd.grad(checkpoint(module, x * 2, use_reentrant=False).sum(), x)
            assert meter.now == 0
    finally:
        gc.enable()
