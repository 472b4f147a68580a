"""What a recompute restores, and what it is refused for, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing, Tiling
from tests.engines.cells import launch, set_up
from tests.engines.conftest import OnRanks
from tests.models import H
from tests.recompute.noticed import CHANGES, DRAWS, Reads, ReadsBlock, as_before

POLICIES: dict[str, tuple[type[Reads], dict[str, Any]]] = {
    "tiles": (Reads, {"tiling": Tiling(4, targets=["Reads"]), "activation_checkpointing": None}),
    "blocks": (ReadsBlock, {"tiling": None, "activation_checkpointing": ActivationCheckpointing(["ReadsBlock"])}),
}
ENGINES = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
RESTORED = ("random state", "buffer in place", "buffer, replaced")
REFUSED = ("global", "class attribute", "tensor in a list", *DRAWS)


class Net(nn.Module):
    """Two blocks and a loss."""

    def __init__(self, kind: type[Reads]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def losses(engine: str, policy: str, change: str, at: int, early: bool) -> list[float]:
    """The losses of three steps, one of which changes something before its backward pass or after it. A step that is
    refused has none.
    """
    kind, options = POLICIES[policy]
    fabric, net = launch(engine, **options), Net(kind)
    found, block = list[float](), net.blocks[0]  # which FSDP wraps
    model, optimizer = set_up(fabric, net, engine, lambda weights: torch.optim.SGD(weights, 0.5))
    for step in range(3):
        mask = torch.linspace(0.5, 1.5, 40)[:, None].expand(2, 40, H).clone()
        block.draw = DRAWS.get(change, float) if step == at else float  # type: ignore[assignment]
        loss = model(torch.randn(2, 40, H, generator=torch.Generator().manual_seed(step)), mask)
        try:
            for now in (True, False):
                if step == at and change in CHANGES and now == early:
                    with torch.no_grad():
                        CHANGES[change](block, mask)
                if now:
                    fabric.backward(loss)
            optimizer.step()
            found.append(float(loss.detach()))
        except RuntimeError as error:
            if "computes other values" not in str(error):
                raise
            if engine.startswith("zero"):  # DeepSpeed goes on after no exception in a backward pass
                break
        optimizer.zero_grad()
        as_before()
    fabric.strategy.release()
    return found


@pytest.mark.table("(zero3|fsdp2)-random state|ddp-buffer in place|fsdp-buffer, replaced")
@pytest.mark.parametrize("change", RESTORED)
@pytest.mark.parametrize("engine", ENGINES)
def test_restored(engine: str, change: str, on_ranks: OnRanks) -> None:
    """The recompute of a block begins with the random state and the buffers that its forward pass began with."""
    late = on_ranks(losses, engine, "blocks", change, 1, False)
    assert on_ranks(losses, engine, "blocks", change, 1, True) == late
    assert len(late[0]) == 3


@pytest.mark.table("ddp-blocks|fsdp-tiles|fsdp2-(blocks|tiles)|zero2-tiles|zero3-blocks")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_refused(engine: str, policy: str, on_ranks: OnRanks) -> None:
    """A recompute that computes other values is refused in the step in which something changed, the first or a later
    one, and the step after it is right.
    """
    for number, change in enumerate(REFUSED):
        for found in on_ranks(losses, engine, policy, change, number % 2, True):
            assert len(found) == (number % 2 if engine.startswith("zero") else 2)
