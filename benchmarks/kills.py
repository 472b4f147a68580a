"""End training by signals, again and again, and resume it each time: ``python -m benchmarks.kills --runs 100``.

Two gloo ranks train a small language model with offload to disk and a checkpoint every few steps. At a random moment,
while they start or in a later step, a rank, both ranks or what launched them gets a signal. Then all processes must end
in time, and leave no file in the offload directory, no process and no shared memory. The next run resumes from the last
checkpoint. Its losses must be those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

import lt_tiled
from benchmarks.sheet import Cell, Sheet
from lt_tiled import ActivationCheckpointing
from tests.engines.cells import strategy
from tests.lit import Ids, LitTiny, trainer
from tests.models import lm_loss
from tests.processes import Script, alive, guard, kill

ENGINES = ("ddp", "fsdp2", "zero3")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP, SIGKILL", "SIGSTOP, SIGCONT")
TARGETS = ("rank 0", "rank 1", "both ranks", "launcher")
STEPS, SAVE_EVERY = 100, 5
LIMIT = 180
"""Seconds in which all processes must end after a signal, and in which they must begin to train."""


class LitKilled(LitTiny):
    """Trains on batches by their index, because Lightning does not resume a loader. Appends each loss to a file."""

    def __init__(self, losses: Path) -> None:
        super().__init__()
        self.file = losses

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(2 * index + self.global_rank))
        loss = lm_loss(self.net(ids), ids)
        with self.file.open("a") as file:
            file.write(f"{self.trainer.global_step} {float(loss.detach()).hex()}\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.model is not None
        return torch.optim.AdamW(self.trainer.model.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Ids(4 * STEPS), batch_size=2)


def train(engine: str, directory: Path) -> None:
    """Train as one of the ranks, from the last checkpoint if there is one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background of a shell ignore it
    policy = ActivationCheckpointing(offload="disk", directory=str(directory / "spill"), min_bytes=0, keep_last=0)
    often: dict[str, Any] = {"every_n_train_steps": SAVE_EVERY, "monitor": "step", "mode": "max", "save_top_k": 2}
    run = trainer(
        strategy(lt_tiled, engine, tiling=4, activation_checkpointing=policy, timeout=timedelta(seconds=300)),
        devices=2,
        max_steps=STEPS,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(directory / "saved", "{step}", **often)],
    )
    last = saved(directory)
    losses = directory / f"losses{os.environ.get('LOCAL_RANK', 0)}"
    run.fit(LitKilled(losses), ckpt_path=last[-1] if last else None, weights_only=False)


def saved(directory: Path) -> list[Path]:
    """Return the checkpoints in the order of their steps."""
    return sorted((directory / "saved").glob("*.ckpt"), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step before which a checkpoint was saved."""
    return int(checkpoint.stem.removeprefix("step="))


@dataclass
class Outcome:
    """What came of the kills of one engine by one signal."""

    kills: int = 0
    starting: int = 0
    seconds: list[float] = field(default_factory=list)
    alive: int = 0
    left: list[str] = field(default_factory=list)
    losses: int = 0
    wrong: int = 0
    damaged: int = 0
    """Checkpoints that could not be loaded, so that the next run resumed from the one before."""


class Soak:
    """Runs of one engine in one directory, each of which is ended by a signal."""

    def __init__(self, engine: str, home: Path, chance: random.Random) -> None:
        self.engine, self.home, self.chance = engine, home, chance
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)
        self.directory = self.fresh()
        run = self.start("lightning")
        if run.wait():
            raise RuntimeError(f"the undisturbed run of {engine} failed with exit code {run.returncode}")
        self.true = [dict(line.split() for line in lines) for lines in self.lines()]
        self.directory, self.last = self.fresh(), Outcome()

    def fresh(self) -> Path:
        """Return a new directory."""
        directory = Path(tempfile.mkdtemp(prefix=self.engine, dir=self.home))
        (directory / "spill").mkdir()
        return directory

    def start(self, launcher: str) -> Script:
        """Start the ranks."""
        command = [sys.executable, "-m"]
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"] * (launcher == "torchrun")
        command += ["benchmarks.kills", "--train", self.engine, str(self.directory)]
        run = Script(*command, DS_ACCELERATOR="cpu")
        threading.Thread(target=run.communicate, daemon=True).start()  # else a full pipe stops the ranks
        return run

    def lines(self) -> list[list[str]]:
        """Return what the ranks wrote into their files of losses."""
        files = [self.directory / f"losses{rank}" for rank in (0, 1)]
        return [file.read_text().splitlines() if file.exists() else [] for file in files]

    def once(self) -> str:
        """Start, send a signal at a random moment, and look. Return what happened in one line."""
        name, target = self.chance.choice(SIGNALS), self.chance.choice(TARGETS)
        launcher = self.chance.choice(("lightning", "torchrun"))
        shared = set(os.listdir("/dev/shm"))
        before = [len(lines) for lines in self.lines()]
        first = max(map(step_of, saved(self.directory)), default=0)
        run = self.start(launcher)
        steps = self.chance.randint(1, 2 * SAVE_EVERY)
        if self.chance.random() < 0.2:
            time.sleep(self.chance.uniform(0, 10))
        elif not self.until(lambda: self.steps_since(before) >= steps or run.poll() is not None) or run.poll():
            kill(run.token)
            return self.cannot_start(run)
        time.sleep(self.chance.uniform(0, 0.3))
        outcome = self.outcomes[name]
        outcome.kills += 1
        outcome.starting += (starting := not self.steps_since(before))
        self.last = self.last if starting else outcome
        self.strike(run, name, target)
        begun = time.monotonic()
        ended = self.until(lambda: not alive(run.token) and run.poll() is not None)
        outcome.seconds.append(took := time.monotonic() - begun)
        kill(run.token)
        run.wait()
        left = [path.name for path in (self.directory / "spill").iterdir()]
        left += [f"/dev/shm/{entry}" for entry in set(os.listdir("/dev/shm")) - shared]
        outcome.left += left
        if any(lines and lines[-1].startswith(f"{STEPS - 1} ") for lines in self.lines()):
            ended = False  # the ranks were not ended, and trained on to the end
        outcome.alive += not ended
        at = "starting" if starting else f"after {self.steps_since(before)} steps"
        wrong = self.compare(before, first, outcome)
        if max(map(step_of, saved(self.directory)), default=0) > STEPS - 5 * SAVE_EVERY:
            shutil.rmtree(self.directory)
            self.directory = self.fresh()
        return f"{name} to {target} ({launcher}, {at}): {took:.1f} s, {left=}, {wrong=}, {'' if ended else 'ALIVE'}"

    def cannot_start(self, run: Script) -> str:
        """Count a checkpoint that could not be loaded, and remove it, so that the one before is used."""
        self.last.damaged += 1
        name = saved(self.directory)[-1].name
        path = self.directory / "saved" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return f"{name} could not be loaded (exit code {run.returncode})"

    def steps_since(self, before: list[int]) -> int:
        """Return how many steps both ranks took."""
        return min(len(lines) - old for lines, old in zip(self.lines(), before, strict=True))

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds, and return whether it did in time."""
        end = time.monotonic() + LIMIT
        while not (holds := condition()) and time.monotonic() < end:
            time.sleep(0.1)
        return holds

    def strike(self, run: Script, name: str, target: str) -> None:
        """Send a signal, or stop and then send another one."""
        ranks = {"rank 0": run.pid}  # Lightning's launcher is rank 0
        for pid in alive(run.token):
            with suppress(OSError):  # the process has ended
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks |= {f"rank {rank}": pid for rank in (0, 1) if f"LOCAL_RANK={rank}".encode() in environ}
        pids = {"launcher": [run.pid], "both ranks": list(ranks.values())}.get(target, [ranks.get(target, run.pid)])
        first, _, second = name.partition(", ")
        send(pids, first)
        if second:
            time.sleep(self.chance.uniform(0.2, 3))
            send(pids, second)
        if second == "SIGCONT":  # training goes on, until it is ended
            now = self.steps_since([0, 0])
            self.until(lambda: self.steps_since([0, 0]) >= now + 3 or run.poll() is not None)
            send(list(ranks.values()), "SIGTERM")

    def compare(self, before: list[int], first: int, outcome: Outcome) -> int:
        """Compare the losses of the run, which begin at its first step, with those of the undisturbed one."""
        wrong = 0
        for lines, old, true in zip(self.lines(), before, self.true, strict=True):
            for step, line in enumerate(lines[old:], first):
                outcome.losses += 1
                wrong += line != f"{step} {true[str(step)]}"
        outcome.wrong += wrong
        return wrong


def send(pids: list[int], name: str) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[name])


def sheet(soaks: list[Soak]) -> Sheet:
    """Return one row for each engine and signal."""
    headings = ["kills", "starting", "s until the end", "still alive", "left behind", "wrong losses", "damaged"]
    table = Sheet("kills", "Runs ended by signals, and resumed", ["", *headings])
    table.notes = [
        "starting: before the first step. s until the end: median and longest. wrong losses: of all that were compared."
        " damaged: checkpoints that SIGKILL or SIGINT cut short, so that the next run resumed from the one before."
    ]
    for soak in soaks:
        for name, o in sorted(soak.outcomes.items()):
            seconds = sorted(o.seconds)
            # Other processes of the machine make and remove shared memory, too.
            left = [name for name in o.left if not name.startswith("/dev/shm/") or os.path.exists(name)]
            table.add(
                f"{soak.engine}, {name}",
                str(o.kills),
                str(o.starting),
                f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}",
                Cell(str(o.alive), not o.alive),
                Cell(str(len(left)), not left),
                Cell(f"{o.wrong} of {o.losses}", not o.wrong),
                Cell(str(o.damaged), not o.damaged or name not in ("SIGTERM", "SIGSTOP, SIGCONT")),
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to offload to")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train[0], Path(args.train[1]))
        return
    guard()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="kills-") as home:
        soaks = [Soak(engine, Path(home), random.Random(args.seed + n)) for n, engine in enumerate(args.engines)]
        for number in range(args.runs):
            soak = soaks[number % len(soaks)]
            print(f"{number + 1}: {soak.engine}: {soak.once()}", flush=True)
        Console(width=None if sys.stdout.isatty() else 160).print(sheet(soaks).table())


if __name__ == "__main__":
    main()
