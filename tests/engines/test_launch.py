"""Started as users start it: by Lightning's own launcher, by torchrun, and on two nodes; and a rank that fails, or gets
SIGTERM, ends all of them.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cells import in_trainer
from tests.engines.conftest import OnRanks
from tests.processes import Script, finish

PROGRAM = str(Path(__file__).with_name("program.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "spill").mkdir()
    return tmp_path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def on_two_nodes(engine: str, directory: Path) -> list[Script]:
    meet = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return [
        Script(*TORCHRUN, *meet, f"--node-rank={node}", PROGRAM, engine, str(directory), "--nodes=2", "--devices=1")
        for node in range(2)
    ]


@pytest.mark.parametrize(
    ("engine", "launcher"), [("fsdp2", "lightning"), ("zero3", "torchrun"), ("fsdp2", "two nodes")]
)
def test_launchers(engine: str, launcher: str, directory: Path, on_ranks: OnRanks) -> None:
    """Each launcher gives the losses of ranks that the tests started, divides a node's budget by its ranks, and leaves
    no file.
    """
    if launcher == "two nodes":
        runs = on_two_nodes(engine, directory)
    elif launcher == "torchrun":
        runs = [Script(*TORCHRUN, "--standalone", "--nproc-per-node=2", PROGRAM, engine, str(directory))]
    else:
        runs = [Script(sys.executable, PROGRAM, engine, str(directory))]
    codes, printed = finish(runs)
    assert set(codes) == {0}, "".join(printed)
    ranks = told(directory)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {rank["world"] for rank in ranks} == {2}
    assert [rank["node"] for rank in ranks] == ([0, 1] if launcher == "two nodes" else [0, 0])
    assert {rank["budget"] for rank in ranks} == {(8 if launcher == "two nodes" else 4) * 2**20}
    assert all(rank["disk_bytes"] > 0 for rank in ranks)
    assert [rank["losses"] for rank in ranks] == [
        pytest.approx(run.losses, rel=1e-5) for run in on_ranks(in_trainer, engine, "tiled", "")
    ]
    assert list((directory / "spill").iterdir()) == []


@pytest.mark.parametrize(("engine", "launcher"), [("fsdp", "torchrun"), ("zero2", "lightning")])
def test_one_rank_fails(engine: str, launcher: str, directory: Path) -> None:
    """An exception on rank 1 in its second step ends every rank, within the limit, with the exception in what is
    printed.
    """
    program = (PROGRAM, engine, str(directory), "--fail-on=1")
    command = (
        (*TORCHRUN, "--standalone", "--nproc-per-node=2", *program)
        if launcher == "torchrun"
        else (sys.executable, *program)
    )
    (code,), (printed,) = finish([Script(*command)])
    assert code != 0
    assert "this rank fails" in printed
    assert told(directory) == []
    assert list((directory / "spill").iterdir()) == []


def test_one_rank_is_terminated(directory: Path) -> None:
    """SIGTERM to rank 1 ends every rank, within the limit, with the reason in what is printed, and the exit code of
    SIGTERM.
    """
    (code,), (printed,) = finish([Script(sys.executable, PROGRAM, "ddp", str(directory), "--terminate=1")])
    assert code == 143, printed
    assert "Rank 1 received SIGTERM: all ranks end before step 2." in printed
    assert told(directory) == []
    assert list((directory / "spill").iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_terminated_in_validate(rank: int, directory: Path) -> None:
    """SIGTERM to a rank in ``validate`` ends every rank, within the limit, with the reason in what is printed."""
    (code,), (printed,) = finish(
        [Script(sys.executable, PROGRAM, "ddp", str(directory), f"--terminate={rank}", "--validate")]
    )
    assert code != 0
    assert f"Rank {rank} received SIGTERM, and all ranks end." in printed


@pytest.mark.parametrize("when", ["early", "late"])
def test_the_first_rank_is_killed_at_the_start(when: str, directory: Path) -> None:
    """SIGKILL to the first rank of Lightning's launcher ends the second one, which would wait 30 minutes for it:
    before it has a strategy and after.
    """
    start = Script(sys.executable, PROGRAM, "ddp", str(directory), f"--kill-first={when}")
    _, (printed,) = finish([start], limit=300)
    assert ("which started this rank, has ended" in printed) == (when == "early")


def test_torchrun_is_killed(directory: Path) -> None:
    """SIGKILL to torchrun ends its ranks, within the limit, which would train on to the end without it."""
    program = (PROGRAM, "ddp", str(directory), "--kill-torchrun")
    _, (printed,) = finish([Script(*TORCHRUN, "--standalone", "--nproc-per-node=2", *program)])
    assert "received SIGTERM: all ranks end before step 2." in printed
    assert told(directory) == []
    assert list((directory / "spill").iterdir()) == []
