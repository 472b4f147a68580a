"""The recompute leaves out the last projection only where nothing can see it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import tile
from lt_tiled.errors import NotPositionWiseError
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patch import TiledPatch
from tests.models import GatedMLP, H
from tests.parity import EXACT, gradients, randn, reference, worst

pytestmark = pytest.mark.usefixtures("float64")


def last(module: nn.Module) -> list[nn.Linear | None]:
    return [plan.last for plan in get_patch(module, TiledPatch).plans.values()]


class WritesOutput(GatedMLP):
    """Notes a statistic of its output in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.largest.copy_(y.detach().abs().max())
        return y


class ReadsLater(GatedMLP):
    """Reads its output from its second call on, and swallows exceptions."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y = super().forward(x)
        if self.calls > 1:
            with contextlib.suppress(Exception):
                assert bool(y.detach().sum() < 1e9)
        return y


class KeepsOutput(GatedMLP):
    """Keeps its output for later."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = y.detach()
        return y


class HooksOutput(GatedMLP):
    """Lets a gradient hook read the value."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * y.detach().sign())
        return y


@pytest.mark.parametrize("module", [WritesOutput, KeepsOutput, HooksOutput, ReadsLater])
def test_a_value_that_is_seen_is_computed(module: type[nn.Module]) -> None:
    """A module that reads, stores or hooks the value of its last projection has the untiled gradients."""
    torch.manual_seed(0)
    m, x = module(), randn(1, 40, H)
    true = reference(m, x)
    ReadsLater.calls = 0
    tile(m, num_shards=4, self_check=module is HooksOutput)  # which refuses the others
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT
    assert (last(m) == [None]) == (module is HooksOutput)


def test_hooks_of_torch_see_real_values() -> None:
    """A hook of ``torch.nn.utils`` on the last projection sees its real output in the recompute too."""
    m, seen = GatedMLP(), []

    def hook(_: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(float(output.detach().abs().sum()))

    hook.__module__ = "torch.nn.utils"
    m.down.register_forward_hook(hook)
    tile(m, num_shards=4, self_check=False)
    for _ in range(3):
        seen.clear()
        m(randn(1, 40, H)).sum().backward()
    assert seen[:4] == seen[4:]
    assert min(seen) > 0


class HooksLater(GatedMLP):
    """Sets a gradient hook on its output once it is asked to."""

    hooks = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.hooks and y.requires_grad:
            y.register_hook(lambda g: g * 2)
        return y


def test_a_hook_that_comes_later_is_refused() -> None:
    """A hook on the output that the first call did not show, and that the recompute would lose, is refused."""
    m, x = tile(HooksLater(), num_shards=4), randn(1, 40, H)
    gradients(m, x)
    m.hooks = True
    with pytest.raises(RuntimeError, match="HooksLater computes other values"):
        gradients(m, x)


class Flagged(GatedMLP):
    """Mixes tokens if it is called with a flag."""

    def forward(self, x: Tensor, mixes: bool = False) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True) if mixes else x)


@pytest.mark.self_checks
def test_another_flag_is_checked_by_itself() -> None:
    """A call with another flag than the ones before is another kind of call, with a self-check of its own."""
    m, x = tile(Flagged(), num_shards=4), randn(1, 40, H)
    m(x)
    with pytest.raises(NotPositionWiseError, match="not position-wise"):
        m(x, mixes=True)


def test_a_projection_whose_forward_was_replaced() -> None:
    """A tiled projection runs what other code put in place of its forward."""
    m, x = nn.Linear(H, H), randn(1, 40, H)
    m.forward = lambda input: nn.Linear.forward(m, input) * 2
    expected = m(x)
    assert torch.allclose(tile(m, num_shards=4)(x), expected, rtol=EXACT)
