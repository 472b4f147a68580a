"""The recompute leaves out the last projection only where nothing can see it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patch import TiledPatch
from tests.models import GatedMLP

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
