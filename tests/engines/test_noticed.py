"""What is noticed under each engine: a step is right, or refused, if what its recompute reads changes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing, Tiling
from tests.engines.cells import launch, set_up
from tests.engines.conftest import OnRanks
from tests.models import H
from tests.recompute.noticed import AROUND, CHANGES, DRAWS, Namespace, Reads, ReadsBlock, as_before

POLICIES: dict[str, tuple[type[Reads], dict[str, Any]]] = {
    "tiles": (Reads, {"tiling": Tiling(4, targets=["Reads"]), "activation_checkpointing": None}),
    "blocks": (ReadsBlock, {"tiling": None, "activation_checkpointing": ActivationCheckpointing(["ReadsBlock"])}),
    "kept": (
        ReadsBlock,
        {"tiling": None, "activation_checkpointing": ActivationCheckpointing(["ReadsBlock"], keep="attention")},
    ),
}


def changes_under(engine: str) -> list[str]:
    """Those after which the engine itself goes on: one that shards weights knows no new ones, and ZeRO-3 has none
    between the passes.
    """
    names = [*CHANGES, *DRAWS, *AROUND]
    if engine != "ddp":
        names = [name for name in names if name not in ("submodule", "adapter")]
    return [name for name in names if engine != "zero3" or "weight" not in name]


class Net(nn.Module):
    """Two blocks and a loss."""

    def __init__(self, kind: type[Reads]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def loss_after(engine: str, policy: str, name: str, step: int, early: bool) -> float | None:
    """The loss after a step in which something changes before the backward pass or after it; ``None`` if refused."""
    kind, options = POLICIES[policy]
    fabric = launch(engine, **options)
    net = Net(kind)
    model, optimizer = set_up(fabric, net, engine, lambda weights: torch.optim.SGD(weights, 0.5))
    block: Any = net.blocks[0]
    mask = torch.linspace(0.5, 1.5, 40)[:, None].expand(2, 40, H).clone()
    around = AROUND[name]() if name in AROUND else nullcontext()
    try:
        for now in range(1, step + 1):
            last = now == step
            block.draw = DRAWS.get(name, float) if last else float
            x = torch.randn(2, 40, H, generator=torch.Generator().manual_seed(now))
            with around if last else nullcontext():
                loss = model(x, mask)
                if last and name in AROUND and not early:
                    fabric.backward(loss)
            for when in ("before", "after"):
                if last and name in CHANGES and early == (when == "before"):
                    with torch.no_grad():
                        CHANGES[name](block, mask)
                if when == "before" and not (last and name in AROUND and not early):
                    fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        block.draw = float
        as_before()
        model.eval()
        with torch.no_grad():
            return float(model(x, torch.ones(2, 40, H)))
    except (RuntimeError, ValueError):
        if not early:
            raise
        return None
    finally:
        as_before()
        fabric.strategy.release()


def wrong(engine: str, policy: str, path: str) -> list[str]:
    """The changes after which a step is neither right nor refused, or of which nothing was noticed."""
    Namespace.path = f"{path}-{dist.get_rank()}"
    as_before()
    found = []
    for number, name in enumerate(changes_under(engine)):
        step = (1, 3, 5)[number % 3]
        loss = loss_after(engine, policy, name, step, early=True)
        if loss is not None and name in DRAWS:
            found.append(name)
        elif loss is not None:
            true = loss_after(engine, policy, name, step, early=False)
            if true is None or abs(loss - true) > 1e-5 * abs(true):
                found.append(f"{name}: {loss} {true}")
    return found


@pytest.mark.table("ddp-kept|fsdp2-tiles|zero2-blocks")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_change(engine: str, policy: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Whatever a recompute reads, a step is right or refused, and the changes are those of one process."""
    for found in on_ranks(wrong, engine, policy, str(tmp_path / "number")):
        assert found == []


def losses_around(engine: str, refused: bool) -> list[float]:
    """The losses of two steps, with one between them that is refused, or not there."""
    fabric = launch(engine, tiling=Tiling(4, targets=["Reads"]), activation_checkpointing=True)
    net = Net(Reads).eval()
    model, optimizer = set_up(fabric, net, engine, lambda weights: torch.optim.SGD(weights, 0.5))
    mask, losses = torch.ones(2, 40, H), list[float]()
    for step in range(3):
        if step == 1 and not refused:
            continue
        x = torch.randn(2, 40, H, generator=torch.Generator().manual_seed(step))
        loss = model(x, mask)
        if step == 1:
            CHANGES["global"](net.blocks[0], mask)
            with pytest.raises(RuntimeError, match="computes other values"):
                fabric.backward(loss)
            as_before()
        else:
            fabric.backward(loss)
            optimizer.step()
            losses.append(float(loss))
        optimizer.zero_grad()
    losses.append(float(model(x, mask)))
    fabric.strategy.release()
    return losses


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp2"])
def test_the_step_after(engine: str, on_ranks: OnRanks) -> None:
    """The steps after one that was refused are right. DeepSpeed goes on after no exception in a backward pass."""
    assert on_ranks(losses_around, engine, True) == on_ranks(losses_around, engine, False)
