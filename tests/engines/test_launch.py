"""Started as users start it: by Lightning's own launcher, by torchrun, and on two nodes; and a rank that fails, or gets
SIGTERM, ends all of them.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cells import in_trainer
from tests.engines.conftest import OnRanks
from tests.forks import Forked
from tests.parity import near

pytestmark = pytest.mark.slow

PROGRAM = ("python", str(Path(__file__).with_name("program.py")))
TORCHRUN = ("python", "-m", "torch.distributed.run")


def told(directory: Path, engine: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((directory / engine).glob("rank*.json"))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "spill").mkdir()
    return tmp_path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(directory: Path, *commands: tuple[str, ...]) -> tuple[list[int], str]:
    """Return the exit codes of commands, when they and their ranks have ended within the limit, and what they print."""
    printed = directory / "printed.txt"
    runs = [Forked(*command, printed=printed, cwd=directory) for command in commands]
    codes = [run.finish(with_children=True) for run in runs]
    assert None not in codes, printed.read_text()
    return [code for code in codes if code is not None], printed.read_text()


@pytest.mark.table("lightning.*")
@pytest.mark.parametrize(
    ("launcher", "engine", "failing"),
    [("lightning", "fsdp2", "zero2"), ("torchrun", "zero3", "fsdp"), ("two nodes", "fsdp2", None)],
)
def test_launchers(launcher: str, engine: str, failing: str | None, directory: Path, on_ranks: OnRanks) -> None:
    """Each launcher gives the losses of ranks that the tests started, divides a node's budget by its ranks and leaves
    no file. Torchrun on two nodes exits with 0. With the others a second training of the same processes fails on rank
    1, which ends every rank within the limit, with the exception in what is printed.
    """
    fails = [] if failing is None else [failing, "--fail-on=1"]
    program = (*PROGRAM[1:], str(directory), engine, *fails)
    commands: list[tuple[str, ...]] = [("python", *program)]
    if launcher == "torchrun":
        commands = [(*TORCHRUN, "--standalone", "--nproc-per-node=2", *program)]
    elif launcher == "two nodes":
        meet = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
        commands = [(*TORCHRUN, *meet, f"--node-rank={n}", *program, "--nodes=2", "--devices=1") for n in range(2)]
    codes, printed = run(directory, *commands)
    ranks = told(directory, engine)
    assert [rank["rank"] for rank in ranks] == [0, 1], printed
    assert {rank["world"] for rank in ranks} == {2}
    assert [rank["node"] for rank in ranks] == ([0, 1] if launcher == "two nodes" else [0, 0])
    assert {rank["budget"] for rank in ranks} == {(8 if launcher == "two nodes" else 4) * 2**20}
    assert all(rank["disk_bytes"] > 0 for rank in ranks)
    assert [rank["losses"] for rank in ranks] == [near(run.losses) for run in on_ranks(in_trainer, engine, "tiled", "")]
    if failing is None:
        assert set(codes) == {0}, printed
    else:
        assert 0 not in codes
        assert "this rank fails" in printed
        assert told(directory, failing) == []
    assert list((directory / "spill").iterdir()) == []


def test_torchrun_is_killed(directory: Path) -> None:
    """SIGKILL to torchrun ends its ranks, within the limit, which would train on to the end without it."""
    program = (*PROGRAM[1:], str(directory), "ddp", "--kill-torchrun")
    _, printed = run(directory, (*TORCHRUN, "--standalone", "--nproc-per-node=2", *program))
    assert "received SIGTERM: all ranks end before step 2." in printed
    assert told(directory, "ddp") == []
    assert list((directory / "spill").iterdir()) == []


def test_one_rank_is_terminated(directory: Path) -> None:
    """SIGTERM to rank 1 ends every rank, within the limit, with the reason in what is printed, and the exit code of
    SIGTERM.
    """
    (code,), printed = run(directory, (*PROGRAM, str(directory), "ddp", "--terminate=1"))
    assert code == 143, printed
    assert "Rank 1 received SIGTERM: all ranks end before step 2." in printed
    assert told(directory, "ddp") == []
    assert list((directory / "spill").iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_terminated_in_validate(rank: int, directory: Path) -> None:
    """SIGTERM to a rank in ``validate`` ends every rank, within the limit, with the reason in what is printed."""
    (code,), printed = run(directory, (*PROGRAM, str(directory), "ddp", f"--terminate={rank}", "--validate"))
    assert code != 0
    assert f"Rank {rank} received SIGTERM, and all ranks end." in printed


@pytest.mark.parametrize("when", ["early", "late"])
def test_the_first_rank_is_killed_at_the_start(when: str, directory: Path) -> None:
    """SIGKILL to the first rank of Lightning's launcher ends the second one, which would wait 30 minutes for it:
    before it has a strategy and after.
    """
    _, printed = run(directory, (*PROGRAM, str(directory), "ddp", f"--kill-first={when}"))
    assert ("which started this rank, has ended" in printed) == (when == "early")
