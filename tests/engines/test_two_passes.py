"""Several forward passes before one backward pass, as DPO and contrastive losses have them, on each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engines.cells import draw, error_of, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import Block, TinyLM, lm_loss
from tests.parity import near

POLICIES: dict[str, dict[str, Any]] = {
    "untiled": {"tiling": None, "activation_checkpointing": None},
    "tiles": {"tiling": 4, "activation_checkpointing": None},
    "both": {"tiling": 4, "activation_checkpointing": True},
}


def no_gradient(ids: list[Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """DPO's, with a reference that takes no gradient between the two calls."""
    chosen = loss(ids[0])
    with torch.no_grad():
        reference = loss(ids[1])
    return F.softplus(chosen - loss(ids[2]) - reference)


LOSSES: dict[str, Callable[[list[Tensor], Callable[[Tensor], Tensor]], Tensor]] = {
    "two calls": lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]),
    "three calls": lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]) + loss(ids[2]),
    "product": lambda ids, loss: loss(ids[0]) * loss(ids[1]),  # whose first call comes last in the backward pass
    "no gradient between": no_gradient,
    "first is unused": lambda ids, loss: 0 * loss(ids[0]).detach() + loss(ids[1]),
    "last is unused": lambda ids, loss: loss(ids[0]) + 0 * loss(ids[1]).detach(),
}


def calls(engine: str, policies: str) -> dict[str, list[float]]:
    """The losses of three steps with several calls of a model each."""
    found = {}
    for name, of_calls in LOSSES.items():
        fabric = launch(engine, **POLICIES[policies])
        model, optimizer = set_up(fabric, TinyLM(), engine, lambda ps: torch.optim.SGD(ps, 0.5))
        losses = []
        for step in range(3):
            batches = [draw((2, length), 2 * step + dist.get_rank()) for length in (24, 20, 28)]
            loss = of_calls(batches, lambda ids, model=model: lm_loss(model(ids), ids))  # type: ignore[misc]
            losses.append(step_on(fabric, optimizer, loss))
        found[name] = losses
        fabric.strategy.release()
    return found


@pytest.mark.parametrize(
    ("engine", "policies"),
    [("ddp", "both"), ("fsdp2", "both"), ("zero2", "both"), ("zero3", "both"), ("zero3", "tiles")],
)
def test_several_calls(engine: str, policies: str, on_ranks: OnRanks) -> None:
    """The losses are those of DDP whichever calls of a model the backward pass goes through."""
    plain, found = on_ranks.once(calls, "ddp", "untiled"), on_ranks(calls, engine, policies)
    assert found == [{name: near(losses) for name, losses in of_rank.items()} for of_rank in plain]


class Changes(Block):
    """Adds a buffer, multiplies with what no checkpoint restores, and collects a loss beside its output."""

    collected: list[Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.collects = False
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * OTHER.gain + self.shift)
        if self.collects:
            self.collected.append(x.square().mean())
        return x


class OTHER:
    """Looked into by no observation."""

    gain = 1.0


CHANGES: dict[str, Callable[[Changes], object]] = {
    "buffer in place": lambda block: block.shift.add_(1),
    "another class": lambda block: setattr(OTHER, "gain", 2.0),
    "collected losses": lambda block: setattr(block, "collects", True),
}


def changed(engine: str, change: str) -> tuple[str, str]:
    """The error of a step with a change between two forward passes."""
    OTHER.gain = 1.0
    Changes.collected.clear()
    fabric = launch(engine, **POLICIES["both"])
    net = TinyLM()
    net.blocks = nn.ModuleList([Changes(), Changes()])
    blocks = list(net.blocks)
    model, optimizer = set_up(fabric, net, engine)
    ids = draw((2, 24), 0)
    first = lm_loss(model(ids), ids)
    for block in blocks:
        CHANGES[change](block)
    loss = first + lm_loss(model(ids), ids)
    try:
        return error_of(lambda: step_on(fabric, optimizer, loss + sum(Changes.collected)))
    finally:
        fabric.strategy.release()


@pytest.mark.parametrize(
    ("engine", "change", "message"),
    [
        ("ddp", "buffer in place", "Changes.shift of shape [16] was changed in place"),
        ("zero3", "another class", "its recompute computes other values"),
        ("fsdp2", "collected losses", "was sharded again by FSDP"),
    ],
)
def test_a_change_between_two_forward_passes(engine: str, change: str, message: str, on_ranks: OnRanks) -> None:
    """What a recompute would silently compute otherwise than its forward pass is refused on all ranks."""
    for kind, text in on_ranks(changed, engine, change):
        assert kind
        assert message in text
