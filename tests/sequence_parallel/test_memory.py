"""Live bytes of shared sequences, and of heads at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lt_tiled
from lt_tiled import SequenceParallel
from tests.meters import peak_bytes
from tests.sequence_parallel.models import HeadsOnly
from tests.sequence_parallel.runs import peaks
from tests.world import World


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "most"), [({}, 1.05), ({"head_tiles": 4, "keep": "attention"}, 1.01)], ids=["all heads", "head tiles"]
)
def test_a_quarter_of_the_tokens(options: dict[str, Any], most: float, four_ranks: World) -> None:
    """A rank of four that share a sequence has the peak of one rank with a quarter of the tokens."""
    policies = {"activation_checkpointing": True, "tiling": True, "loss": True}
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
