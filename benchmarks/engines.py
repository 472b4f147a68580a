"""Whose tiled MLP trains under which engine: ``python -m benchmarks --only engines``.

On two gloo ranks a small language model takes four steps of SGD, with every peer's tiles in its blocks, and its losses are compared with
those of the untiled model under the same engine. Wrong gradients show in the losses of the next steps. Under DeepSpeed's stages and FSDP
the weights are sharded; the last rows have ranks with sequences of different length, one of them with fewer tokens than its tiles can
have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.profiler import ProfilerActivity, profile

import lt_tiled
from benchmarks.peers import Peer, tile_with
from benchmarks.sheet import Cell, Sheet
from lt_tiled import Tiling
from tests.engines.cells import draw, set_up, strategy
from tests.models import GatedMLP, TinyLM, lm_loss
from tests.world import RanksFailed, World

SHARDS = 4
WAIT_SECONDS = 20
CLOSE = 1e-4


@dataclass(frozen=True)
class Row:
    """An engine and what is done under it."""

    name: str
    engine: str
    lengths: tuple[int, int] = (24, 24)
    accumulate: int = 1


ROWS = [
    Row("DDP", "ddp"),
    Row("DDP, two backwards a step", "ddp", accumulate=2),
    Row("FSDP", "fsdp"),
    Row("FSDP, use_orig_params=False", "fsdp_flat"),
    Row("FSDP2, blocks as units", "fsdp2"),
    Row("ZeRO-1", "zero1"),
    Row("ZeRO-2", "zero2"),
    Row("ZeRO-3", "zero3"),
    Row("DDP, ranks of 5 and 24 tokens", "ddp", (5, 24)),
    Row("FSDP2, ranks of 5 and 24 tokens", "fsdp2", (5, 24)),
    Row("ZeRO-3, ranks of 5 and 24 tokens", "zero3", (5, 24)),
]


def train(row: Row, name: str, shards: int = SHARDS) -> tuple[list[float], int]:
    """The losses of four steps on this rank, and the gathers of weights in the last one."""
    chosen = strategy(lt_tiled.fabric, row.engine, tiling=Tiling(shards) if name == "lt_tiled" else None, checkpointing=None)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=chosen)
    fabric.launch()
    torch.manual_seed(0)
    net = TinyLM()
    if name != "lt_tiled":  # which the strategy applies
        for module in net.modules():
            if isinstance(module, GatedMLP):
                tile_with(name, module, shards)
    model, optimizer = set_up(fabric, net, row.engine)
    rank = dist.get_rank()

    def step() -> float:
        for micro in range(row.accumulate):
            ids = draw((1, row.lengths[rank]), 10 * rank + micro)
            with fabric.no_backward_sync(model, enabled=micro + 1 < row.accumulate):
                loss = lm_loss(model(ids), ids)
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    losses = [step() for _ in range(3)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        losses.append(step())
    chosen.release()
    return losses, sum(event.name.startswith("c10d::") and "allgather" in event.name for event in profiled.events())


def engines(everyone: list[Peer], rows: list[Row] = ROWS) -> list[Sheet]:
    """One row for each engine, one column for each peer at hand; and the gathers."""
    here = [peer.name for peer in everyone if peer.tile is not None]
    grid = Sheet("engines", "tiled MLPs under the engines, two ranks", ["", *here])
    grid.notes = ["The greatest relative difference of four losses from the untiled run's; ✗ above 1e-4."]
    gathers = Sheet("gathers", "gathers of weights in a step", ["", "untiled", *(f"{name}, 4 and 16 tiles" for name in here)])
    worlds = {True: World(2), False: World(2)}  # DeepSpeed changes torch in its process
    try:
        for row in rows:
            world = worlds[row.engine.startswith("zero")]
            untiled = world(train, row, "untiled")
            grid.add(row.name, *(_cell(world, row, name, untiled) for name in here))
            if row in (ROWS[4], ROWS[7]):
                gathers.add(row.name, str(untiled[0][1]), *(_gathers(world, row, name) for name in here))
    finally:
        for world in worlds.values():
            world.kill()
    return [grid, gathers]


def _cell(world: World, row: Row, name: str, untiled: list[tuple[list[float], int]]) -> Cell:
    try:
        ran = world(train, row, name, timeout=WAIT_SECONDS)
    except RanksFailed as failure:
        return Cell(_reason(str(failure)), False)
    off = max(abs(a - b) / abs(b) for (found, _), (true, _) in zip(ran, untiled, strict=True) for a, b in zip(found, true, strict=True))
    return Cell(f"{off:.0e}" if off < CLOSE else f"wrong: {off:.0e}", off < CLOSE)


def _gathers(world: World, row: Row, name: str) -> str:
    counts = []
    for shards in (4, 16):
        try:
            counts.append(str(world(train, row, name, shards, timeout=WAIT_SECONDS)[0][1]))
        except RanksFailed:
            counts.append("fails")
    return ", ".join(counts)


def _reason(told: str) -> str:
    """The kind of the first exception, or that it hung."""
    last = [line for line in told.splitlines() if line and not line[0].isspace() and "Error" in line.split(":")[0]]
    return f"raises {last[0].split(':')[0].split('.')[-1]}" if last else "hangs"
