"""Step times side by side: ``python -m benchmarks --only step_time``.

Each round times one training step of a Llama with activation checkpointing, once untiled and once with the tiles of
each package, in a rotating order. A ratio compares two steps of one round, so that other load affects both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.costs import Size, llama, loss_of, with_checkpointing
from benchmarks.peers import Peer
from benchmarks.sheet import Cell, Sheet, machine, spread
from lt_tiled.memory import PeakMemory

QUICK = Size(tokens=2048, hidden=256, intermediate=1024, layers=2, shards=2)
HERE = Size(tokens=4096, hidden=512, intermediate=1536, layers=2, shards=4)
ON_GPU = Size(tokens=32768, hidden=4096, intermediate=14336, layers=2, shards=8)


def step_time(peers: list[Peer], device: torch.device, rounds: int = 9, quick: bool = False) -> list[Sheet]:
    """One row for each peer at hand: the median and the range of its ratios to the untiled step."""
    size, dtype = (ON_GPU, torch.bfloat16) if device.type == "cuda" else (QUICK if quick else HERE, torch.float32)
    model = llama(size, device, dtype)
    ids = torch.randint(512, (1, size.tokens), device=device)
    names = ["untiled", *(peer.name for peer in peers if peer.tile is not None)]
    with ExitStack() as stack:
        steps = {
            name: step_of(stack.enter_context(with_checkpointing(model, name, size.shards)), ids) for name in names
        }
        times = interleaved(steps, rounds)
        peaks = {name: device_peak(step, device) for name, step in steps.items()} if device.type == "cuda" else {}
    work = f"{size.layers} layers of {size.hidden} with activation checkpointing"
    title = f"a training step, {work}, {size.tokens} tokens in {size.shards} tiles"
    headings = ["", "median [s]", "relative to untiled, median", "range", *(["peak allocated [GiB]"] if peaks else [])]
    sheet = Sheet("step_time", title, headings)
    sheet.notes = [f"{rounds} rounds, {str(dtype)[6:]}, {machine(device)}; ✓ fastest tiled MLP."]
    medians = {name: statistics.median(ratios(times, name, "untiled")) for name in names}
    for name in names:
        relative = ratios(times, name, "untiled")
        others = [median for other, median in medians.items() if other not in ("untiled", name)]
        ahead = medians[name] < min(others) if others and name != "untiled" else None
        cells: list[Cell | str] = [
            f"{statistics.median(times[name]):.3f}",
            Cell(f"{medians[name]:.2f}", ahead),
            spread(relative),
        ]
        sheet.add(name, *cells, *([f"{peaks[name] / 2**30:.2f}"] if peaks else []))
    return [sheet]


def step_of(model: nn.Module, ids: Tensor) -> Callable[[], float]:
    """A function that runs one step and returns its seconds."""

    def step() -> float:
        seconds = seconds_of(lambda: loss_of(model, ids).backward(), ids.device)
        model.zero_grad(set_to_none=True)
        return seconds

    return step


def interleaved(
    variants: dict[str, Callable[[], float]], rounds: int, enough: Callable[[int, float], bool] = lambda *_: False
) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round. The first round warms up and is left out.

    After each round ``enough`` is asked, with the number of rounds and the seconds that one more round would end at.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    start = time.monotonic()
    for index in range(rounds + 1):
        begun = time.monotonic()
        for name in list(variants)[:: 1 if index % 2 else -1]:
            times[name].append(variants[name]())
        now = time.monotonic()
        if index and enough(index, now - start + now - begun):
            break
    return {name: seconds[1:] for name, seconds in times.items()}


def ratios(times: dict[str, list[float]], name: str, base: str) -> list[float]:
    """Return the ratios of one variant to another, round by round."""
    return [a / b for a, b in zip(times[name], times[base], strict=True)]


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """How long a run takes: by the device's own events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1000


def device_peak(run: Callable[[], Any], device: torch.device) -> int:
    """Return the bytes that a run allocates at its peak; on a CPU, those of the process."""
    memory, before = PeakMemory(device), torch.cuda.memory_allocated()
    memory.reset()
    run()
    return memory.read() - before
