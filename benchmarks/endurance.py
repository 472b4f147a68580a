"""Measure what many steps and many preparations leave behind: ``python -m benchmarks.endurance``.

A process takes 2,000 training steps with tiles and offload to disk, and then prepares and releases a model 200 times,
with a step in between. Memory, file descriptors, threads, spill files and Python objects at the end must not exceed
those after the first tenth (memory: by more than 8 MiB; objects: by more than 32).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.sheet import Cell, Sheet
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from tests.models import TinyLM, loss_of

MEMORY_MIB = 8
"""By how much the memory of the process may grow. Allocators keep some."""
OBJECTS = 32
"""How many Python objects may be added. Threads make their own when they first have work; a leak adds some per step."""


def usage(directory: str) -> dict[str, float]:
    """Return what the process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()]
    spilled = [fd.stat().st_blocks * 512 for fd in files if str(fd.readlink()).startswith(directory)]
    return {
        "memory, MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "file descriptors": len(files),
        "threads": threading.active_count(),
        "threads of the process": len(os.listdir("/proc/self/task")),
        "disk, KiB": sum(spilled) / 2**10,
        "files in the directory": len(os.listdir(directory)),
        "Python objects": len(gc.get_objects()),
    }


def step(model: torch.nn.Module, number: int) -> None:
    """Train one step, on a sequence of another length than the one before."""
    ids = torch.arange(2 * (24 + number % 8)).view(2, -1) % 32
    loss_of(model, ids, tiled=number % 2 == 0).backward()
    model.zero_grad()


def steps(directory: str, count: int) -> list[dict[str, float]]:
    """Return the usage after a tenth and after all of the steps."""
    model = TinyLM(4)
    with prepare(model, tiling=Tiling(4), activation_checkpointing=policy(directory)):
        return measured(lambda number: step(model, number), directory, count)


def cycles(directory: str, count: int) -> list[dict[str, float]]:
    """Return the usage after a tenth and after all of the preparations."""
    model = TinyLM(4)

    def cycle(number: int) -> None:
        with prepare(model, tiling=Tiling(4), activation_checkpointing=policy(directory)):
            step(model, number)

    return measured(cycle, directory, count)


def policy(directory: str) -> ActivationCheckpointing:
    return ActivationCheckpointing(offload="disk", directory=directory, keep_last=0)


def measured(run: Callable[[int], None], directory: str, count: int) -> list[dict[str, float]]:
    """Run many times, and return the usage after a tenth and at the end."""
    found = []
    for number in range(count):
        run(number)
        if number + 1 in (count // 10, count):
            found.append(usage(directory))
    return found


def sheet(title: str, found: list[dict[str, float]]) -> Sheet:
    """Return one row for each figure."""
    table = Sheet("endurance", title, ["", "after a tenth", "at the end"])
    for name, first in found[0].items():
        last = found[-1][name]
        bound = first + (MEMORY_MIB if "memory" in name else OBJECTS if "objects" in name else 0)
        table.add(name, f"{first:.0f}", Cell(f"{last:.0f}", last <= bound))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to offload to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lt_tiled").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print(sheet(f"{args.steps} steps", steps(directory, args.steps)).table())
        console.print(sheet(f"{args.cycles} preparations", cycles(directory, args.cycles)).table())


if __name__ == "__main__":
    main()
