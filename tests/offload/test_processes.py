"""However a process ends, nothing is left on the disk and nothing hangs; and processes do not disturb each other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from lt_tiled import ActivationCheckpointing, prepare
from tests.forks import Forked
from tests.models import TinyLM, lm_loss
from tests.processes import Script, finish

pytestmark = pytest.mark.slow

IDS = torch.arange(2 * 24).view(2, 24) % 32


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (scratch := tmp_path / "scratch").mkdir()
    return scratch


def fork(program: str, scratch: Path) -> Forked:
    """Start one of the programs, in a fork that ends as an interpreter does."""
    words = ("python", "-m", "tests.offload.programs", program, str(scratch))
    return Forked(*words, printed=scratch.parent / "printed.txt", cwd=scratch.parent, finalize=True)


def interrupted(program: str, scratch: Path, word: str) -> tuple[int, str]:
    """Start one of the programs, in an interpreter of its own, and send SIGINT when it has printed a word."""
    process = Script(sys.executable, "-m", "tests.offload.programs", program, str(scratch))
    assert process.stdout is not None
    while word not in (line := process.stdout.readline()):
        assert line, f"the program ended before it printed {word!r}"
    process.send_signal(signal.SIGINT)
    (code,), (printed,) = finish([process])
    return code, printed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_in_mid_write(scratch: Path, number: signal.Signals) -> None:
    """A process that is killed while it writes leaves no file and no directory, seen from outside."""
    if number == signal.SIGINT:
        code, _ = interrupted("write_for_ever", scratch, "writing")
        assert code != 0
    else:
        process = fork("write_for_ever", scratch)
        process.wait_for("writing")
        os.kill(process.process.pid, number)
        assert process.finish() == -number
    assert list(scratch.iterdir()) == []


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
    """Two processes in one directory have a file each; killing one leaves the other's data alone."""
    other = fork("write_for_ever", scratch)
    other.wait_for("writing")
    model = TinyLM(4)
    with prepare(model, activation_checkpointing=True):
        lm_loss(model(IDS), IDS).backward()
    plain = model.embed.weight.grad.clone()
    model.zero_grad()
    with prepare(
        model,
        activation_checkpointing=ActivationCheckpointing(offload="disk", directory=str(scratch), keep_last=0),
    ):
        loss = lm_loss(model(IDS), IDS)
        os.kill(other.process.pid, signal.SIGKILL)
        assert other.finish() == -signal.SIGKILL
        loss.backward()
    assert torch.equal(model.embed.weight.grad, plain)
    assert list(scratch.iterdir()) == []


def test_two_models_in_one_process(tmp_path: Path) -> None:
    """Two prepared models in one process and one directory train side by side, each with its own file."""
    models = [TinyLM(4), TinyLM(4)]
    policy = ActivationCheckpointing(offload="disk", directory=str(tmp_path), keep_last=0)
    plain = []
    for model in models:
        lm_loss(model(IDS), IDS).backward()
        plain.append(model.embed.weight.grad.clone())
        model.zero_grad()
    with (
        prepare(models[0], activation_checkpointing=policy) as a,
        prepare(models[1], activation_checkpointing=policy) as b,
    ):
        losses = [lm_loss(model(IDS), IDS) for model in models]
        for loss in losses:
            loss.backward()
        assert a.offloader.disk.spill is not b.offloader.disk.spill
        assert a.offloader.so_far().disk_bytes == b.offloader.so_far().disk_bytes > 0
    assert all(torch.allclose(m.embed.weight.grad, p, rtol=1e-5) for m, p in zip(models, plain, strict=True))
