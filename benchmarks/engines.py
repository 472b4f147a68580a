"""Whose tiled MLP trains under which engine: ``python -m benchmarks --only engines``.

On two gloo ranks a small language model takes four steps of SGD, with every peer's tiles in its blocks, and its losses
are compared with those of the untiled model under the same engine. Wrong gradients show in the losses of the next
steps. Under DeepSpeed's stages and FSDP the weights are sharded; the last rows have ranks with sequences of different
length, one of them with fewer tokens than its tiles can have.
"""

from __future__ import annotations

import logging
from contextlib import closing
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
WAIT_SECONDS, START_SECONDS = 20, 90
CLOSE = 1e-4


@dataclass(frozen=True)
class Row:
    """An engine and what is done under it."""

    name: str
    engine: str
    lengths: tuple[int, int] = (24, 24)
    accumulate: int = 1
    all_gathers: bool = False
    """Whether its all-gathers are counted, too."""


Ran = list[tuple[list[float], int]]
"""Of each rank, its losses and all-gathers."""

ROWS = [
    Row("DDP", "ddp"),
    Row("DDP, two backward passes per step", "ddp", accumulate=2),
    Row("FSDP", "fsdp"),
    Row("FSDP, use_orig_params=False", "fsdp_flat"),
    Row("FSDP2, blocks as FSDP units", "fsdp2", all_gathers=True),
    Row("ZeRO-1", "zero1"),
    Row("ZeRO-2", "zero2"),
    Row("ZeRO-3", "zero3", all_gathers=True),
    Row("DDP, ranks of 5 and 24 tokens", "ddp", (5, 24)),
    Row("FSDP2, ranks of 5 and 24 tokens", "fsdp2", (5, 24)),
    Row("ZeRO-3, ranks of 5 and 24 tokens", "zero3", (5, 24)),
]


def train(row: Row, name: str, shards: int = SHARDS) -> tuple[list[float], int]:
    """The losses of four steps on this rank, and the all-gathers of weights in the last one."""
    logging.getLogger("lt_tiled").setLevel(logging.WARNING)
    chosen = strategy(
        lt_tiled.fabric,
        row.engine,
        tiling=Tiling(shards) if name == "lt_tiled" else None,
        activation_checkpointing=None,
    )
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


def attempt(row: Row, name: str, shards: int = SHARDS) -> tuple[list[float], int] | str:
    """The same, or the kind of what was raised."""
    try:
        return train(row, name, shards)
    except Exception as error:  # a peer may raise anything
        return type(error).__name__


def engines(everyone: list[Peer], rows: list[Row] = ROWS) -> list[Sheet]:
    """One row for each engine, one column for each peer at hand, and a table of all-gathers."""
    here = [peer.name for peer in everyone if peer.tile is not None]
    grid = Sheet("engines", "tiled MLPs under the engines, two ranks", ["", *here])
    grid.notes = ["Largest relative difference of four losses to the untiled run; ✗ above 1e-4."]
    all_gathers = Sheet("all_gathers", "all-gathers of weights in a step, at 4 and at 16 tiles", ["", "untiled", *here])
    with closing(Ranks()) as ranks:
        for row in rows:
            untiled = ranks.run(row, "untiled")
            if isinstance(untiled, str):
                grid.add(row.name, *(Cell(f"not measured: the untiled run {untiled}") for _ in here))
                continue
            grid.add(row.name, *(_cell(ranks.run(row, name), untiled) for name in here))
            if row.all_gathers:
                all_gathers.add(row.name, str(untiled[0][1]), *(_count(ranks, row, name) for name in here))
    return [grid, all_gathers]


def _cell(ran: Ran | str, untiled: Ran) -> Cell:
    if isinstance(ran, str):
        return Cell(ran, False)
    off = _distance(ran, untiled)
    return Cell(f"{off:.0e}" if off < CLOSE else f"wrong: {off:.0e}", off < CLOSE)


def _distance(ran: Ran, untiled: Ran) -> float:
    return max(
        abs(a - b) / abs(b)
        for (found, _), (true, _) in zip(ran, untiled, strict=True)
        for a, b in zip(found, true, strict=True)
    )


def _count(ranks: Ranks, row: Row, name: str) -> str:
    counts = [ranks.run(row, name, shards) for shards in (4, 16)]
    return ", ".join("fails" if isinstance(ran, str) else str(ran[0][1]) for ran in counts)


class Ranks:
    """Two worlds of ranks, one of them for DeepSpeed, which changes torch in its process."""

    def __init__(self) -> None:
        self.worlds = {True: World(2), False: World(2)}
        self.untiled: dict[str, Ran] = {}

    def run(self, row: Row, name: str, shards: int = SHARDS) -> Ran | str:
        """Return the losses of the ranks, or say how they failed.

        Ranks on which one failed are used again only if they still train as before.
        """
        world = self.worlds[row.engine.startswith("zero")]
        ran = self._attempt(world, row, name, shards, WAIT_SECONDS if row.name in self.untiled else START_SECONDS)
        if isinstance(ran, str) and row.name in self.untiled:
            again = self._attempt(world, row, "untiled", SHARDS, START_SECONDS)
            if isinstance(again, str) or _distance(again, self.untiled[row.name]) > CLOSE:
                world.kill()
                self._attempt(
                    world, row, "untiled", SHARDS, START_SECONDS
                )  # imports what the next one would be timed with
        elif not isinstance(ran, str) and name == "untiled":
            self.untiled[row.name] = ran
        return ran

    @staticmethod
    def _attempt(world: World, row: Row, name: str, shards: int, seconds: float) -> Ran | str:
        try:
            ran = world(attempt, row, name, shards, timeout=seconds)
        except RanksFailed as failure:
            return "dies" if "the process died" in str(failure) else "hangs"
        raised = [answer for answer in ran if isinstance(answer, str)]
        return f"raises {raised[0]}" if raised else ran

    def close(self) -> None:
        for world in self.worlds.values():
            world.kill()
