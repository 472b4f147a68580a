"""Several forward passes before one backward pass, as DPO and contrastive losses have them, on each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.engines.cells import draw, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import TinyLM, lm_loss
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
