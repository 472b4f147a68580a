"""The ranks of the multi-process tests can fail, hang and die without taking the session with them."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import LIMIT
from tests.world import RanksFailed, World

pytestmark = pytest.mark.slow


def total(value: int) -> float:
    t = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(t)
    return float(t)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("rank one is unwell")
    dist.barrier()


def hang() -> None:
    time.sleep(2 * LIMIT)


def die() -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("body", "message", "limit"),
    [
        (fail_on_one, "rank 1: .*ArithmeticError: rank one is unwell", LIMIT),
        (hang, "rank 0: no answer within", 3),
        (die, "the process died", LIMIT),
    ],
)
def test_failed_world_is_replaced(world: World, body: object, message: str, limit: float) -> None:
    """A failure, a hang and a death each fail the test with the rank's message, and the next test has a new world."""
    with pytest.raises(RanksFailed, match=f"(?s){message}"):
        world(body, timeout=limit)
    assert world(total, 1) == [3.0, 3.0]
