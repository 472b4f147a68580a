"""Started as users start it: by Lightning's own launcher, by torchrun, and on two nodes; and a rank that fails ends all
of them.
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
