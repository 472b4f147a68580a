"""However a process ends, nothing is left on the disk and nothing hangs; and processes do not disturb each other."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from lt_tiled import ActivationCheckpointing, prepare
from lt_tiled.offload.offloader import Offloader, build_offloader
from tests.forks import Forked
from tests.models import TinyLM, lm_loss

pytestmark = pytest.mark.slow

IDS = torch.arange(2 * 24).view(2, 24) % 32


# Programs that this file runs in other processes


def write_for_ever(o: Offloader) -> None:
    """Pack and drop until the process is killed."""
    real = os.pwritev
    os.pwritev = lambda *a: print("writing", flush=True) or real(*a)
    while True:
        packed = [o.pack(torch.randn(2**20), "block") for _ in range(4)]
        del packed


def exit_in_flight(o: Offloader) -> None:
    """Leave the interpreter while writes run."""
    real = o.disk._write
    o.disk._write = lambda *a: (time.sleep(0.5), real(*a))
    packed = [o.pack(torch.randn(2**20), "block") for _ in range(2)]
    print(len(packed), "in flight", flush=True)


def fork_after_start(o: Offloader) -> None:
    """Fork, as DataLoader workers do; the child may not offload and leaves quietly, the parent goes on."""
    tensor = torch.randn(1000)
    packed = o.pack(tensor, "block")
    child = os.fork()
    if child == 0:
        try:
            o.pack(torch.randn(1000), "block")
        except Exception as error:
            print("child:", error, flush=True)
        del packed
        sys.exit(7)
    status = os.waitpid(child, 0)[1]
    print("child left with", os.waitstatus_to_exitcode(status), flush=True)
    print("parent:", torch.equal(o.unpack(packed), tensor), flush=True)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (scratch := tmp_path / "scratch").mkdir()
    return scratch


def fork(program: str, scratch: Path) -> Forked:
    """Start one of the programs, in a fork that ends as an interpreter does."""
    words = ("python", "-m", __name__, program, str(scratch))
    return Forked(*words, printed=scratch.parent / "printed.txt", cwd=scratch.parent, finalize=True)


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("exit_in_flight", ["2 in flight"]),
        ("fork_after_start", ["child: this process is a fork", "child left with 7", "parent: True"]),
    ],
)
def test_the_end_of_a_program(program: str, lines: list[str], scratch: Path) -> None:
    """The interpreter ends in order while writes run. A forked child may not offload, exits normally, and leaves the
    parent's data alone.
    """
    process = fork(program, scratch)
    code, printed = process.finish(), process.printed.read_text()
    assert code == 0, printed
    for line in lines:
        assert line in printed
    assert "Error" not in printed
    assert list(scratch.iterdir()) == []


def test_two_processes_in_one_directory(scratch: Path) -> None:
    """Two processes in one directory have a file each; killing one while it writes leaves nothing of its own, and the
    other's data alone.
    """
    other = fork("write_for_ever", scratch)
    other.wait_for("writing")
    model = TinyLM(4)
    with prepare(model, activation_checkpointing=True):
        lm_loss(model(IDS), IDS).backward()
    plain = model.embed.weight.grad.clone()
    model.zero_grad()
    policy = ActivationCheckpointing(offload="disk", directory=str(scratch), keep_last=0)
    with prepare(model, activation_checkpointing=policy):
        loss = lm_loss(model(IDS), IDS)
        os.kill(other.process.pid, signal.SIGKILL)
        assert other.finish() == -signal.SIGKILL
        loss.backward()
    assert torch.equal(model.embed.weight.grad, plain)
    assert list(scratch.iterdir()) == []


if __name__ == "__main__":
    name, directory = sys.argv[1:]
    globals()[name](build_offloader(ActivationCheckpointing(offload="disk", directory=directory, keep_last=0)))
