"""How a call of a tiled module runs: in tiles, or untiled for a reason. See NOTE [How a call runs]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

from lt_tiled import Tiling
from lt_tiled.errors import NotPositionWiseError
from lt_tiled.modules.feed_forward import Tileable
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.call import EngineNeeds
from lt_tiled.tiling.patch import TiledPatch, patch_tiled
from tests.models import Coded, GatedMLP, H
from tests.parity import gradients, randn, worst

pytestmark = [pytest.mark.self_checks, pytest.mark.usefixtures("float64")]


def mixing() -> nn.Module:
    return Coded(lambda m, x: m.mlp(x - x.mean(-2, keepdim=True)))


class WithExperts(nn.Module):
    """Mixes tokens above its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([GatedMLP(), GatedMLP()])
        self.router = nn.Linear(H, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(1)
        return sum(expert(x) * scores[..., i, None] for i, expert in enumerate(self.experts))


def hooked() -> nn.Module:
    module = GatedMLP()
    module.up.register_forward_hook(lambda *_: None)
    return module


@pytest.fixture(params=[1, 2], ids=["one rank", "several ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks, which does nothing."""
    if request.param > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    if request.param > 1:
        dist.destroy_process_group()


def passes_anchor(output: Tensor) -> bool:
    """Whether the weights of an output went through an anchor."""
    todo, names = [output.grad_fn], set[str]()
    while todo:
        node = todo.pop()
        names.add(node.name())
        todo += [following for following, _ in node.next_functions if following is not None]
    return "AnchorBackward" in names


TILES, UNTILED, EXPERTS = "tiles", "untiled", "experts in tiles"
REASONS: dict[str, tuple[Any, ...]] = {
    # what runs, the shape of its input, what is around; what follows if a user chose it, or not; ranks with an anchor
    "none": (GatedMLP, (1, 24, H), nullcontext, TILES, TILES, (1, 2)),
    "transform": (GatedMLP, (1, 24, H), parametrize.cached, UNTILED, UNTILED, ()),
    "hook": (hooked, (1, 24, H), nullcontext, "untiled, warns", "untiled, warns", (2,)),
    "inputs": (GatedMLP, (H,), nullcontext, UNTILED, UNTILED, (2,)),
    "short": (GatedMLP, (1, 3, H), nullcontext, UNTILED, UNTILED, (2,)),
    "check": (mixing, (1, 24, H), nullcontext, "raises", "untiled, warns", (2,)),
    "check of a mixture": (WithExperts, (1, 24, H), nullcontext, EXPERTS + ", warns", EXPERTS + ", warns", (1, 2)),
}


@pytest.mark.parametrize("requested", [True, False], ids=["requested", "found"])
@pytest.mark.parametrize("reason", REASONS)
def test_what_follows(reason: str, requested: bool, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each reason raises, warns or runs untiled, with the untiled gradients, in the first call and in later ones."""
    torch.manual_seed(0)
    build, shape, around, if_requested, if_found, anchored = REASONS[reason]
    expected = if_requested if requested else if_found
    module, x = build(), randn(*shape)
    true = gradients(module, x)
    patch = patch_tiled(Tileable("", module, named=requested), Tiling(4), EngineNeeds(), None)
    if expected == "raises":
        with pytest.raises(NotPositionWiseError):
            module(x)
        return
    for _ in range(2):
        with around():
            assert worst(gradients(module, x), true) < 1e-12
            assert passes_anchor(module(x)) == (ranks in anchored)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == ("warns" in expected)
    experts = [get_patch(expert, TiledPatch) for expert in getattr(module, "experts", ())]
    assert (patch.largest.tiles > 0) == (expected == TILES)
    assert all(expert.largest.tiles > 0 for expert in experts if expert) == ("experts" in expected or not experts)
