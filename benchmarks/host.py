"""What a tile costs the host: ``python -m benchmarks --only host``.

Process time of Python, torch's dispatcher and autograd in one thread, for one tile of an MLP so small that its
arithmetic takes next to nothing. On a GPU the host must be ahead of the device, or small tiles wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.harness import Options, Table, host_seconds_of, interleaved, machine
from benchmarks.peers import Tile, tiles
from tests.models import GatedMLP

FEW, MANY = 64, 256
"""Tiles of a call. The slope between them leaves out what is done once for each call."""
HIDDEN, TOKENS = 16, 4
"""The tile: 4 tokens of an MLP of 16 x 48."""


def host(options: Options) -> list[Table]:
    """One row for each package."""
    title = f"Host time of one tile more: an MLP of {HIDDEN} x {3 * HIDDEN}, {TOKENS} tokens a tile"
    table = Table(title, ["", "forward and backward [µs]", "relative to lt_tiled"])
    rounds = 3 * options.rounds
    table.note = f"Process time, medians of {rounds} interleaved rounds, {machine(options.device)}."
    steps: dict[str, Callable[[], None]] = {}
    for name, tile in tiles().items():
        for count in (FEW, MANY):
            steps[f"{name} {count}"] = tiled_step(tile, count, options.device)
    times = interleaved(steps, rounds, host_seconds_of)
    own = 0.0
    for name in tiles():
        few, many = (statistics.median(times[f"{name} {count}"]) for count in (FEW, MANY))
        more = (many - few) / (MANY - FEW) * 1e6
        own = own or more
        table.add(name, f"{more:.0f}", f"{more / own:.2f}")
    return [table]


def tiled_step(tile: Tile, count: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass in so many tiles."""
    torch.manual_seed(0)
    mlp = GatedMLP(HIDDEN, 3 * HIDDEN).to(device)
    tile(mlp, count)
    x = torch.randn(1, count * TOKENS, HIDDEN, device=device, requires_grad=True)
    gradient = torch.randn_like(x)

    def step() -> None:
        mlp.zero_grad(set_to_none=True)
        x.grad = None
        mlp(x).backward(gradient)

    return step
