"""Tiled modules of a grammar: equal to the untiled module, or refused with its name and a remedy. Nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from lt_tiled import tile
from tests.property.grammar import Case, Values, cases, differences, position_wise_cases, refused, run
from tests.property.parts import H, build

pytestmark = [pytest.mark.slow, pytest.mark.self_checks]


def untiled(case: Case) -> Values:
    """Return what the untiled module gives; drop the case if torch itself refuses it."""
    try:
        return run(case, tiled=False)
    except Exception:
        assume(False)
        raise


@given(cases())
def test_equal_or_refused(case: Case) -> None:
    """Any module in any surroundings gives the untiled results, or an error with its name and a remedy."""
    true = untiled(case)
    try:
        found = run(case, tiled=True)
    except Exception as error:
        if not refused(error):
            raise
        return
    assert not differences(case, found, true)


@given(position_wise_cases())
def test_position_wise_modules_are_not_refused(case: Case) -> None:
    """A module that works position by position gives the untiled results."""
    true = untiled(case)
    assert not differences(case, run(case, tiled=True), true)


class Noisy(nn.Module):
    """A part and a dropout whose masks are recorded, or replayed, outside of the module."""

    def __init__(self, name: str, masks: list[Tensor], replayed: list[Tensor]) -> None:
        super().__init__()
        self.part = build(name)
        self.masks = lambda: masks  # not an attribute that changes
        self.replayed = replayed

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        if self.replayed or not self.training:
            return y * (self.replayed or [1.0])[0]
        mask = torch.rand_like(y).gt(0.5).to(y.dtype)
        self.masks().append(mask)
        return y * mask


@given(
    name=st.sampled_from(["linear", "gated", "in place", "residual", "routed", "nn.Sequential", "tied", "norm"]),
    lead=st.tuples(st.integers(1, 4), st.integers(1, 20)),
    tiles=st.integers(2, 9),
    twice=st.booleans(),
)
def test_dropout(name: str, lead: tuple[int, int], tiles: int, twice: bool) -> None:
    """The gradients of a module with dropout are those of the masks that its forward pass drew."""
    masks: list[Tensor] = []
    torch.manual_seed(0)
    module = Noisy(name, masks, []).double()
    tile(module, num_shards=tiles)
    x = torch.randn(*lead, H, dtype=torch.float64, requires_grad=True)
    module(x)  # the self-check draws too
    masks.clear()
    y = module(x)
    whole = torch.cat([mask.flatten(0, -2) for mask in masks]).view(*lead, H)
    if twice:
        module(x)
    found = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], allow_unused=True)
    torch.manual_seed(0)
    replayed = Noisy(name, [], [whole]).double()
    z = replayed(x)
    true = torch.autograd.grad(z.square().sum(), [x, *replayed.parameters()], allow_unused=True)
    for a, b in zip([y, *found], [z, *true], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-12)
