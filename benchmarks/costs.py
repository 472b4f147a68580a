"""What tiled MLPs cost in a training step of a Llama with activation checkpointing.

``--only costs`` counts FLOPs and bytes, which are the same in every run on a CPU. ``--only step_time`` times the steps,
also those of lt_tiled with other settings, and without the comparison of each recompute with its forward pass.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Options, Size, Table, compared, draw, interleaved, llama, loss_of, marked, step_of
from benchmarks.peers import Tile, tiles
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.planner.ledger import Ledger
from lt_tiled.recompute import blocks
from lt_tiled.tiling import run

BASE = "without tiling"
UNCOMPARED = "lt_tiled, without the comparison"
SETTINGS = {
    "lt_tiled, without the comparison": ActivationCheckpointing(),
    'lt_tiled, `keep="attention"`': ActivationCheckpointing(keep="attention"),
    "lt_tiled, block inputs in CPU memory": ActivationCheckpointing(offload="cpu"),
}


@contextmanager
def with_checkpointing(model: nn.Module, name: str, tile: Tile | None, shards: int) -> Iterator[Any]:
    """Copy the model with activation checkpointing, and with the MLPs tiled by a package."""
    model = copy.deepcopy(model)
    tiling = None
    if name.startswith("lt_tiled"):
        tiling = Tiling(num_shards=shards)
    elif tile is not None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            tile(layer.mlp, shards)
    policy = SETTINGS.get(name, ActivationCheckpointing())
    with prepare(model, tiling=tiling, activation_checkpointing=policy):
        yield model


def costs(options: Options) -> list[Table]:
    """One row for each package."""
    size = options.size(Size(1024, 128, 512, 2, 8), *2 * [Size(2048, 256, 1024, 4, 16)])
    title = f"Exact costs of a step: {size.layers} layers, {size.tokens} tokens, MLPs in {size.shards} tiles"
    table = Table(title, ["", "FLOPs", "peak memory", "after the forward pass"])
    table.note = "Relative to the step without tiling. Bytes are those that the step allocates, without weights."
    model, ids = llama(size), draw(size)
    base = counted(model, BASE, None, size.shards, ids)
    for name, tile in tiles().items():
        try:
            found = counted(model, name, tile, size.shards, ids)
        except Exception as error:  # a package may raise anything
            table.add(name, marked(f"raises {type(error).__name__}", False), "", "")
            continue
        flops, peak, saved = (a / b for a, b in zip(found, base, strict=True))
        table.add(name, marked(f"{flops:.2f}", flops < 1.005), f"{peak:.2f}", f"{saved:.2f}")
    return [table]


def counted(model: nn.Module, name: str, tile: Tile | None, shards: int, ids: Tensor) -> tuple[int, int, int]:
    """Return FLOPs, peak bytes and bytes after the forward pass of a step."""
    with with_checkpointing(model, name, tile, shards) as tiled:
        step_of(tiled, ids)()  # the first step checks the tiles
        with Ledger() as meter:
            loss = loss_of(tiled, ids)
            saved = meter.now
            loss.backward()
    return int(meter.flops), meter.peak, saved


def step_time(options: Options) -> list[Table]:
    """One row for each package, and for each setting."""
    device = options.device
    size = options.size(Size(2048, 256, 1024, 2, 2), Size(4096, 512, 1536, 2, 4), Size(32768, 4096, 14336, 2, 8))
    dtype = options.size(torch.float32, torch.float32, torch.bfloat16)
    title = f"Step time: {size.layers} layers of {size.hidden}, {size.tokens} tokens, MLPs in {size.shards} tiles"
    table = Table(title, ["", "median [s]", "relative to without tiling", "range", "peak memory [GiB]"])
    table.note = f"{options.rounds} interleaved rounds, {str(dtype)[6:]}, {harness.machine(device)}."
    model, ids = llama(size, device, dtype), draw(size, device)
    variants: dict[str, Tile | None] = {BASE: None, **tiles(), **dict.fromkeys(SETTINGS)}
    with ExitStack() as stack:
        steps: dict[str, Callable[[], None]] = {}
        for name, tile in variants.items():
            tiled = stack.enter_context(with_checkpointing(model, name, tile, size.shards))
            steps[name] = step_of(tiled, ids)
        steps[UNCOMPARED] = partial(uncompared, steps[UNCOMPARED])
        times = interleaved(steps, options.rounds, partial(harness.seconds_of, device=device))
        for name, step in steps.items():
            relative, spread = compared(times, name, BASE)
            peak = f"{harness.peak_of(step, device) / 2**30:.2f}"
            table.add(name, f"{statistics.median(times[name]):.3f}", f"{relative:.2f}", spread, peak)
    return [table]


def uncompared(step: Callable[[], None]) -> None:
    """Run a step without the comparison."""
    with patch.object(blocks, "COMPARED", "none"), patch.object(run, "prints_of", lambda call: None):
        step()
