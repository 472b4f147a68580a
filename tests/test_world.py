"""The ranks of the multi-process tests can fail, hang and die without taking the session with them."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import LIMIT, ROOT, Script, kill
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


def test_runs_on_every_rank(world: World) -> None:
    """The function runs on every rank in one process group, and the results come back in rank order."""
    assert world(total, 3) == [7.0, 7.0]


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
from tests.test_world import hang, total

FORKS.set_forkserver_preload(["torch"])

def test_hangs(world, deepspeed_world):
    script = Script("bash", "-c", "setsid sleep 9999 & echo; sleep 9999; true")
    script.stdout.readline()
    assert deepspeed_world(total, 3) == world(total, 3) == [7.0, 7.0]
    print("hangs", flush=True)
    world(hang)
"""


def descendants(process: int) -> list[int]:
    """Return the ids of a process's children, and of theirs."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


@pytest.mark.table("SIGKILL")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_outlives_pytest(number: signal.Signals, tmp_path: Path) -> None:
    """When pytest is killed, its four ranks, its scripts, their children in other sessions, and its helpers end too."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = ("-s", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path))
    run = Script(sys.executable, "-m", "pytest", *options, "test_hangs.py")
    try:
        assert run.stdout is not None
        while not (line := run.stdout.readline()).endswith("hangs\n"):
            assert line, "pytest ended early"
        watched = [os.pidfd_open(process) for process in descendants(run.pid)]
        assert len(watched) >= 9  # four ranks, their server, multiprocessing's resource tracker, bash, two sleeps
        run.send_signal(number)
        assert run.wait(LIMIT) == -number
        end = time.monotonic() + LIMIT
        while watched and time.monotonic() < end:
            ended = select.select(watched, [], [], 1)[0]
            watched = [process for process in watched if process not in ended]
        assert not watched
    finally:
        kill(run.token)
