"""Whose tiled MLPs train under which engine: ``python -m benchmarks --only engines``.

On two gloo ranks a small language model takes four steps of SGD, with every package's tiles in its blocks, and its
losses are compared with those of the untiled model under the same engine. Wrong gradients show in the losses of the
next steps. In the last rows the ranks have sequences of different lengths, one with fewer tokens than tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from benchmarks.harness import Options, Ranks, Table, marked
from benchmarks.peers import tiles
from lt_tiled import Tiling
from tests.engines.cells import draw, launch, set_up
from tests.models import GatedMLP, TinyLM, lm_loss

SHARDS = 4
CLOSE = 1e-4


class Row(NamedTuple):
    """An engine, the tokens of each rank, and the backward passes of a step."""

    engine: str
    lengths: tuple[int, int] = (24, 24)
    accumulate: int = 1


ROWS = {
    "DDP": Row("ddp"),
    "DDP, two backward passes per step": Row("ddp", accumulate=2),
    "FSDP": Row("fsdp"),
    "FSDP, use_orig_params=False": Row("fsdp_flat"),
    "FSDP2, blocks as FSDP units": Row("fsdp2"),
    "ZeRO-1": Row("zero1"),
    "ZeRO-2": Row("zero2"),
    "ZeRO-3": Row("zero3"),
    "DDP, ranks of 5 and 24 tokens": Row("ddp", (5, 24)),
    "FSDP2, ranks of 5 and 24 tokens": Row("fsdp2", (5, 24)),
    "ZeRO-3, ranks of 5 and 24 tokens": Row("zero3", (5, 24)),
}


def train(row: Row, name: str) -> list[float]:
    """Return the losses of four steps on this rank, with the tiles of a package."""
    tiling = Tiling(SHARDS) if name == "lt_tiled" else None
    fabric = launch(row.engine, tiling=tiling, activation_checkpointing=None)
    net = TinyLM()
    if name not in ("lt_tiled", "untiled"):
        for module in net.modules():
            if isinstance(module, GatedMLP):
                tiles()[name](module, SHARDS)
    model, optimizer = set_up(fabric, net, row.engine)
    rank = dist.get_rank()
    losses = []
    for _ in range(4):
        for micro in range(row.accumulate):
            ids = draw((1, row.lengths[rank]), 10 * rank + micro)
            with fabric.no_backward_sync(model, enabled=micro + 1 < row.accumulate):
                loss = lm_loss(model(ids), ids)
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    fabric.strategy.release()  # type: ignore[attr-defined]
    return losses


def engines(options: Options) -> list[Table]:
    """One row for each engine, one column for each package."""
    packages = list(tiles())
    table = Table("Tiled MLPs under the engines, on two ranks", ["", *packages])
    table.note = f"Largest relative difference of four losses to the untiled run; ✗ above {CLOSE:g}."
    with Ranks() as ranks:
        for title, row in ROWS.items():
            if options.quick and row != Row(row.engine):
                continue
            # DeepSpeed changes torch in its processes.
            name = "DeepSpeed" if row.engine.startswith("zero") else "others"
            untiled = ranks(name, train, row, "untiled")
            assert not isinstance(untiled, str), untiled
            cells = [judged(ranks(name, train, row, package, timeout=60), untiled) for package in packages]
            table.add(title, *cells)
    return [table]


def judged(found: list[list[float]] | str, untiled: list[list[float]]) -> str:
    """Return the largest difference of the losses of the ranks, or how they failed."""
    if isinstance(found, str):
        return marked(found.partition(":")[0], False)
    off = 0.0
    for losses, true in zip(found, untiled, strict=True):
        off = max(off, *(abs(a - b) / abs(b) for a, b in zip(losses, true, strict=True)))
    return marked(f"{off:.0e}", off < CLOSE)
