"""The recompute leaves out the last projection only where nothing can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import tile
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patched import TiledPatch
from tests.models import GatedMLP, H, RoutedMLP
from tests.parity import EXACT, gradients, randn, reference, worst

pytestmark = pytest.mark.usefixtures("float64")


def last(module: nn.Module) -> list[int | None]:
    return list(get_patch(module, TiledPatch).learned.last.values())


class ReadsOutput(GatedMLP):
    """Decides on the value of its output, as T5 does for fp16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if bool(y.detach().abs().sum() > 0) else y * 0


class WritesOutput(GatedMLP):
    """Notes a statistic of its output in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.largest.copy_(y.detach().abs().max())
        return y


class Alternates(GatedMLP):
    """Uses its output from its second call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y = super().forward(x)
        return y if self.calls == 1 else y.exp().log()


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


class CatchesAll(ReadsOutput):
    """Swallows exceptions."""

    def forward(self, x: Tensor) -> Tensor:
        y = GatedMLP.forward(self, x)
        try:
            sign = 1.0 if bool(y.detach().sum() < 1e9) else 2.0
        except Exception:
            sign = 3.0
        return y * sign


class InnerCheckpoint(GatedMLP):
    """Saves tensors through hooks of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x)) * self.up(x)
        return checkpoint(lambda t: self.down(t).exp(), h, use_reentrant=False)


@pytest.mark.parametrize(
    "module",
    [
        ReadsOutput,
        WritesOutput,
        KeepsOutput,
        HooksOutput,
        CatchesAll,
        InnerCheckpoint,
    ],
)
def test_a_value_that_is_seen_is_computed(module: type[nn.Module]) -> None:
    """A module that reads, stores or hides the value of its last projection has it computed, and right gradients."""
    torch.manual_seed(0)
    m, x = module(), randn(1, 40, H)
    true = reference(m, x)
    tile(m, num_shards=4, self_check=module not in (WritesOutput, KeepsOutput))  # which it refuses
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT


def test_hooks_of_torch_see_real_values() -> None:
    """A hook of ``torch.nn.utils`` on the last projection sees its real output in the recompute too."""
    m, seen = GatedMLP(), []

    def hook(_: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(float(output.detach().abs().sum()))

    hook.__module__ = "torch.nn.utils"
    m.down.register_forward_hook(hook)
    tile(m, num_shards=4, self_check=False)
    for _ in range(3):  # in the first two calls the backward pass compares the first tile
        seen.clear()
        m(randn(1, 40, H)).sum().backward()
    assert seen[:4] == seen[4:]
    assert min(seen) > 0


def test_a_buffer_never_gets_a_stand_in() -> None:
    """A buffer that the module writes its output's statistic to holds a real value after the backward."""
    m = tile(WritesOutput(), num_shards=4, self_check=False)
    m(randn(1, 40, H)).sum().backward()
    assert m.largest > 0


def test_experts_that_no_token_visits() -> None:
    """A mixture whose graph differs from tile to tile, with experts that some tiles do not visit, has right
    gradients.
    """
    torch.manual_seed(0)
    m, x = RoutedMLP(experts=8), randn(1, 24, H)
    true = reference(m, x)
    tile(m, num_shards=12)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT


def test_a_value_that_is_used_later_is_computed() -> None:
    """A module that uses its output from the second call on has it computed from then on."""
    torch.manual_seed(0)
    Alternates.calls = 0
    m, x = Alternates(), randn(1, 40, H)
    plain = GatedMLP()
    plain.load_state_dict(m.state_dict())
    true = reference(plain, x)  # exp and log cancel
    tile(m, num_shards=4, self_check=False)
    assert worst(gradients(m, x), true) < EXACT
    assert last(m) == [None]


def test_skipping_is_on_for_a_plain_mlp() -> None:
    """Each step of a plain MLP leaves the last projection out."""
    m = tile(GatedMLP(), num_shards=4)
    for _ in range(2):
        m(randn(1, 40, H)).sum().backward()
    assert None not in last(m)
    assert len(last(m)) == 1
