"""Live bytes of shared sequences, and of heads at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel
from tests.meters import LiveBytes, peak_bytes
from tests.sequence_parallel.models import HeadsOnly
from tests.sequence_parallel.runs import peaks
from tests.world import World


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "keep", "most"),
    [({}, None, 1.05), ({"head_tiles": 4}, "attention", 1.01)],
    ids=["all heads", "head tiles"],
)
def test_a_quarter_of_the_tokens(options: dict[str, Any], keep: Any, most: float, four_ranks: World) -> None:
    """A rank of four that share a sequence has the peak of one rank with a quarter of the tokens."""
    policies = {"activation_checkpointing": ActivationCheckpointing(keep=keep), "tiling": True, "loss": True}
    for shared, alone in four_ranks(peaks, 2048, options, policies):
        assert shared <= most * alone


@pytest.mark.slow
def test_head_tiles() -> None:
    """With ``n`` head tiles the peak of attention is ``4 + 10 / n`` times its hidden states: four of all heads (input,
    output, and their gradients), and of one tile three projections, what is attended, its gradient, those of the
    three projections, and their copy for one product.
    """
    tokens, hidden = 1024, 64
    module = HeadsOnly(hidden, 16)
    x = torch.randn(1, tokens, hidden, requires_grad=True)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).sum().backward()

    for tiles in (2, 4, 8, 16):
        with lt_tiled.prepare(module, sequence_parallel=SequenceParallel(1, head_tiles=tiles)):
            step()
            gradients = sum(p.nbytes for p in module.parameters())
            assert peak_bytes(step) == pytest.approx(x.nbytes * (4 + 10 / tiles) + gradients, rel=0.05)


def left_after_forward(keep: Any) -> int:
    """The bytes alive after the forward pass of two blocks with activation checkpointing, in float32."""
    model, x = HeadsOnly(64, 16), torch.randn(1, 256, 64, requires_grad=True)
    policy = ActivationCheckpointing(keep=keep)
    with lt_tiled.prepare(model, activation_checkpointing=policy), LiveBytes() as meter:
        output = model(x)
        left = meter.now
        del output
    return left


@pytest.mark.parametrize(("keep", "tensors"), [("attention", 4), ("attention_output", 1)])
def test_kept(keep: str, tensors: int) -> None:
    """Each block keeps attention's output and its log-sum-exp, or queries, keys and values as well."""
    kept = 2 * (tensors * 256 * 64 * 4 + 16 * 256 * 4)
    assert left_after_forward(keep) - left_after_forward(None) == pytest.approx(kept, rel=0.002)  # samples aside
