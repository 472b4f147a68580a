"""What the comparison of each recompute with its forward pass costs: ``python -m benchmarks --only checks``.

Steps of a Llama with activation checkpointing in one thread, with the comparison and without it in turn. The first row
is a step at a sequence length that a CPU can train. In the others tokens are so few that a step is host time: Python,
torch's dispatcher and autograd. The last one is the host time of ``keep="attention"``. Figures are of process time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.costs import Size, llama, loss_of
from benchmarks.sheet import Cell, Sheet, machine
from benchmarks.step_time import interleaved, ratios
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.recompute import blocks
from lt_tiled.tiling import run

SHORT = Size(tokens=64, hidden=64, intermediate=256, layers=12, shards=2)


def checks(size: Size, rounds: int) -> list[Sheet]:
    """One row for each kind of step; the first one is of that size."""
    headings = ["", "step [ms]", "relative to the step without", "of a block [ms]"]
    sheet = Sheet("checks", "what the comparison of forward pass and recompute costs", headings)
    sheet.notes = [f"Medians of {rounds} rounds, of {20 * rounds} for host time, {machine(torch.device('cpu'))}."]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step, ratio, _ = measured(size, rounds, step_of(size, True), step_of(size, True, compared=False))
    sheet.add(
        f"{size.tokens} tokens, {size.layers} layers of {size.hidden}, in tiles",
        f"{step:.1f}",
        Cell(f"{ratio:.3f}", ratio <= 1.01),
        "",
    )
    step, ratio, block = measured(SHORT, 20 * rounds, step_of(SHORT, False), step_of(SHORT, False, compared=False))
    sheet.add("host time, blocks", f"{step:.1f}", f"{ratio:.2f}", Cell(f"{block:.2f}", block <= 0.16))
    step, ratio, block = measured(SHORT, 20 * rounds, step_of(SHORT, True), step_of(SHORT, True, compared=False))
    sheet.add("host time, blocks with 2 tiles", f"{step:.1f}", f"{ratio:.2f}", f"{block:.2f}")
    step, ratio, block = measured(SHORT, 20 * rounds, step_of(SHORT, False, "attention"), step_of(SHORT, False))
    sheet.add('host time, `keep="attention"`', f"{step:.1f}", Cell(f"{ratio:.2f}", ratio <= 1.3), f"{block:.2f}")
    torch.set_num_threads(threads)
    return [sheet]


def step_of(size: Size, tiled: bool, keep: Any = None, compared: bool = True) -> Callable[[], float]:
    """Return a function that runs a step of a model of its own, and returns its seconds of process time."""
    model = llama(size, torch.device("cpu"))
    policy = ActivationCheckpointing(keep=keep)
    prepare(model, tiling=Tiling(size.shards) if tiled else None, activation_checkpointing=policy)
    ids = torch.randint(512, (1, size.tokens), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        start = time.process_time()
        loss_of(model, ids).backward()
        seconds = time.process_time() - start
        model.zero_grad(set_to_none=True)
        return seconds

    def step_without() -> float:
        with patch.object(blocks, "COMPARED", "none"), patch.object(run, "prints_of", lambda call: None):
            return step()

    return step if compared else step_without


def measured(size: Size, rounds: int, *steps: Callable[[], float]) -> tuple[float, float, float]:
    """Return milliseconds of the first step, its ratio to the second, and the difference for each block."""
    times = interleaved(dict(zip(("with", "without"), steps, strict=True)), rounds)
    step, other = (statistics.median(seconds) * 1e3 for seconds in times.values())
    return step, statistics.median(ratios(times, "with", "without")), (step - other) / size.layers
