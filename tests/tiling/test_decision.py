"""How a call of a tiled module runs: in tiles, or untiled for a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import Tiling
from lt_tiled.errors import NotPositionWiseError
from lt_tiled.modules.feed_forward import Tileable
from lt_tiled.tiling.patch import TiledPatch, Untiled, decide, patch_tiled
from lt_tiled.tiling.state import EngineNeeds
from lt_tiled.tiling.weights import Work
from tests.models import GatedMLP, H
from tests.parity import randn

pytestmark = pytest.mark.self_checks


class Mixing(nn.Module):
    """Subtracts the mean over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class WithExperts(nn.Module):
    """Mixes tokens above its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([GatedMLP(), GatedMLP()])
        self.router = nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(1)
        return sum(expert(x) * scores[..., i, None] for i, expert in enumerate(self.experts))


def hooked() -> nn.Module:
    module = GatedMLP()
    module.up.register_forward_hook(lambda *_: None)
    return module


def patched(module: nn.Module, same_order: bool = False, named: bool = True, agreed: bool = False) -> TiledPatch:
    name = type(module).__name__
    needs = EngineNeeds(same_order=same_order, agreed=agreed)
    return patch_tiled(Tileable(name, module, name, "forward", named=named), Tiling(4), needs, None)


def reason(module: nn.Module, tokens: int, same_order: bool = False) -> str:
    patch = patched(module, same_order)
    decision = decide(Work(patch.bound(module), (module,)), patch, (randn(1, tokens, H),), {})
    return decision.reason if isinstance(decision, Untiled) else "tiles"


@pytest.mark.parametrize(
    ("module", "tokens", "same_order", "expected"),
    [
        (GatedMLP, 24, False, "tiles"),
        (GatedMLP, 3, False, "one tile"),
        (GatedMLP, 3, True, "tiles"),  # one, so that gradients come in the order of the other ranks
        (hooked, 24, False, "hook"),
        (hooked, 24, True, "hook"),
        (hooked, 3, False, "hook"),
        (Mixing, 24, False, "self-check"),
        (Mixing, 24, True, "self-check"),
        (WithExperts, 24, False, "self-check"),
    ],
)
def test_decision(module: Any, tokens: int, same_order: bool, expected: str) -> None:
    """Each call has one decision, whose reason is the first one in the order of the table in the code."""
    assert reason(module(), tokens, same_order) == expected


@pytest.mark.parametrize(
    ("module", "same_order", "raised"),
    [
        (hooked, False, None),
        (hooked, True, RuntimeError),
        (Mixing, False, NotPositionWiseError),
        (Mixing, True, NotPositionWiseError),
        (WithExperts, False, None),
        (WithExperts, True, NotPositionWiseError),
    ],
)
def test_what_follows(module: Any, same_order: bool, raised: type[Exception] | None) -> None:
    """A module runs untiled, or its experts in tiles, only where all ranks can take gradients in any order."""
    torch.manual_seed(0)
    module, x = module(), randn(1, 24, H)
    true = module(x)
    patch = patched(module, same_order)
    if raised is not None:
        with pytest.raises(raised):
            module(x)
        return
    assert torch.allclose(module(x), true, atol=1e-6)
    assert patch.untiled == isinstance(module, WithExperts)


@pytest.mark.parametrize(("same_order", "agreed"), [(False, False), (True, False), (True, True)])
def test_what_nobody_named_stays_untiled(same_order: bool, agreed: bool) -> None:
    """It is refused only where all ranks must do the same, and did the first backward pass."""
    torch.manual_seed(0)
    module, x = Mixing(), randn(1, 24, H)
    true = module(x)
    patch = patched(module, same_order, named=False, agreed=agreed)
    if agreed:
        with pytest.raises(NotPositionWiseError, match="same order"):
            module(x)
        return
    assert torch.allclose(module(x), true, atol=1e-6)
    assert patch.untiled
