"""However a process ends, nothing is left on the disk and nothing hangs; and processes do not disturb each other."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lt_tiled import Checkpointing, prepare
from tests.models import TinyLM, lm_loss
from tests.processes import LIMIT, Script, kill

IDS = torch.arange(2 * 24).view(2, 24) % 32


Start = Callable[[str, Path], Script]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start one of the programs; kill what still runs when the test is over."""
    started: list[Script] = []

    def run(program: str, directory: Path) -> Script:
        started.append(Script(sys.executable, "-m", "tests.offload.programs", program, str(directory)))
        return started[-1]

    yield run
    for process in started:
        kill(process.token)
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_in_mid_write(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    """A process that is killed while it writes leaves no file and no directory, seen from outside."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = start("write_for_ever", scratch)
    assert process.stdout is not None
    while "writing" not in (line := process.stdout.readline()):
        assert line, "the program ended before it wrote"
    time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert list(scratch.iterdir()) == []


def test_exit_with_io_in_flight(tmp_path: Path, start: Start) -> None:
    """The interpreter ends in time and in order while writes run and others wait."""
    process = start("exit_in_flight", tmp_path)
    printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, printed
    assert "2 in flight" in printed
    assert "Error" not in printed
    assert list(tmp_path.iterdir()) == []


def test_exit_with_a_dead_disk(tmp_path: Path, start: Start) -> None:
    """The interpreter does not wait for a thread that is stuck in a system call, and says so."""
    process = start("dead_disk", tmp_path)
    printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, printed
    assert "2 in flight" in printed
    assert "has not responded for 0.5 s" in printed
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_with_a_dead_disk(tmp_path: Path, start: Start) -> None:
    """Ctrl-C ends a step that waits for a disk, the release says that it does not respond, and the process ends."""
    process = start("wait_for_a_dead_disk", tmp_path)
    assert process.stdout is not None
    while "waiting" not in (line := process.stdout.readline()):
        assert line, "the program ended before it waited"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGINT, printed
    assert "KeyboardInterrupt" in printed
    assert "has not responded for 0.5 s" in printed


def test_fork_after_start(tmp_path: Path, start: Start) -> None:
    """Offloading in a forked child raises, and the child exits normally; the parent's data is untouched."""
    process = start("fork_after_start", tmp_path)
    printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, printed
    assert "child: this process is a fork" in printed
    assert "child left with 7" in printed
    assert "parent: True" in printed


def test_two_processes_in_one_directory(tmp_path: Path, start: Start) -> None:
    """Two processes in one directory have a file each; killing one leaves the other's data alone."""
    other = start("write_for_ever", tmp_path)
    assert other.stdout is not None
    while "writing" not in (line := other.stdout.readline()):
        assert line
    model = TinyLM(4)
    with prepare(model, checkpointing=Checkpointing()):
        lm_loss(model(IDS), IDS).backward()
    plain = model.embed.weight.grad.clone()
    model.zero_grad()
    with prepare(
        model,
        checkpointing=Checkpointing(offload="disk", directory=str(tmp_path), min_bytes=0, keep_last=0, checksum=True),
    ):
        loss = lm_loss(model(IDS), IDS)
        other.kill()
        other.communicate(timeout=LIMIT)
        loss.backward()
    assert torch.equal(model.embed.weight.grad, plain)
    assert list(tmp_path.iterdir()) == []


def test_two_models_in_one_process(tmp_path: Path) -> None:
    """Two prepared models in one process and one directory train side by side, each with its own file."""
    models = [TinyLM(4), TinyLM(4)]
    policy = Checkpointing(offload="disk", directory=str(tmp_path), min_bytes=0, keep_last=0)
    plain = []
    for model in models:
        lm_loss(model(IDS), IDS).backward()
        plain.append(model.embed.weight.grad.clone())
        model.zero_grad()
    with prepare(models[0], checkpointing=policy) as a, prepare(models[1], checkpointing=policy) as b:
        losses = [lm_loss(model(IDS), IDS) for model in models]
        for loss in losses:
            loss.backward()
        assert a.offloader.disk.spill is not b.offloader.disk.spill
        assert a.offloader.so_far().disk_bytes == b.offloader.so_far().disk_bytes > 0
    assert all(torch.allclose(m.embed.weight.grad, p, rtol=1e-5) for m, p in zip(models, plain, strict=True))
