"""The ranks of the multi-process tests can fail, hang and die without taking the session with them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import LIMIT, ROOT, Script, alive, kill
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


HANGS = """
from tests.processes import Script
from tests.forks import FORKS
from tests.test_world import hang

FORKS.set_forkserver_preload(["torch"])

def test_hangs(world):
    script = Script("bash", "-c", "setsid sleep 9999 & echo; sleep 9999; true")
    script.stdout.readline()
    assert world(abs, -3) == [3, 3]
    print("hangs", flush=True)
    world(hang)
"""


@pytest.mark.full
def test_no_process_outlives_pytest(tmp_path: Path) -> None:
    """When pytest is killed, its ranks, its scripts, their children in other sessions, and its helpers end too."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = ("-s", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path))
    run = Script(sys.executable, "-m", "pytest", *options, "test_hangs.py")
    try:
        assert run.stdout is not None
        while not (line := run.stdout.readline()).endswith("hangs\n"):
            assert line, "pytest ended early"
        assert len(alive(run.token)) >= 7  # pytest, two ranks, their server, bash, two sleeps
        run.kill()
        assert run.wait(LIMIT) == -signal.SIGKILL
        end = time.monotonic() + LIMIT
        while alive(run.token):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        kill(run.token)
