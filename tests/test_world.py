"""The ranks of the multi-process tests can fail, hang and die without taking the session with them."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.world import RanksFailed, World


def total(value: int) -> float:
    t = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(t)
    return float(t)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("rank one is unwell")
    dist.barrier()


def hang() -> None:
    time.sleep(60)


def die() -> None:
    os._exit(3)


def test_runs_on_every_rank(world: World) -> None:
    """The function runs on every rank in one process group, and the results come back in rank order."""
    assert world(total, 3) == [7.0, 7.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (fail_on_one, "rank 1: .*ArithmeticError: rank one is unwell"),
        (hang, "rank 0: no answer within"),
        (die, "the process died"),
    ],
)
def test_a_failure_is_shown_and_the_world_replaced(world: World, body: object, message: str) -> None:
    """A failure, a hang and a death each fail the test with the rank's own words, and the next test has a world
    again.
    """
    with pytest.raises(RanksFailed, match=f"(?s){message}"):
        world(body, timeout=3)
    assert world(total, 1) == [3.0, 3.0]
