"""Whose tiled MLPs train under which engine: ``python -m benchmarks --only engines``.

On two gloo ranks a small language model takes four steps of SGD, with every package's tiles in its blocks, and its
losses are compared with those of the untiled model under the same engine. Wrong gradients show in the losses of the
next steps. In the last rows the ranks have sequences of different lengths, one with hardly more tokens than tiles.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.harness import Options, Ranks, Table, judged
from benchmarks.peers import tiles
from lt_tiled import Tiling
from tests.engines import cells
from tests.models import GatedMLP, TinyLM

SHARDS = 4
CLOSE = 1e-4
EVEN, UNEVEN = (24, 24), (5, 24)
ROWS = {  # the engine, and the tokens of each rank
    "DDP": ("ddp", EVEN),
    "FSDP": ("fsdp", EVEN),
    "FSDP, use_orig_params=False": ("fsdp_flat", EVEN),
    "FSDP2, blocks as FSDP units": ("fsdp2", EVEN),
    "ZeRO-1": ("zero1", EVEN),
    "ZeRO-2": ("zero2", EVEN),
    "ZeRO-3": ("zero3", EVEN),
    "DDP, ranks of 5 and 24 tokens": ("ddp", UNEVEN),
    "FSDP2, ranks of 5 and 24 tokens": ("fsdp2", UNEVEN),
    "ZeRO-3, ranks of 5 and 24 tokens": ("zero3", UNEVEN),
}


def train(engine: str, lengths: tuple[int, int], name: str) -> list[float]:
    """Return the losses of four steps on this rank, with the tiles of a package."""
    tiling = Tiling(SHARDS) if name == "lt_tiled" else None
    fabric = cells.launch(engine, tiling=tiling, activation_checkpointing=None)
    net = TinyLM()
    if name not in ("lt_tiled", "untiled"):
        for module in net.modules():
            if isinstance(module, GatedMLP):
                tiles()[name](module, SHARDS)
    model, optimizer = cells.set_up(fabric, net, engine)
    rank = dist.get_rank()
    losses = cells.train(fabric, model, optimizer, 4 * [cells.draw((1, lengths[rank]), rank)])
    fabric.strategy.release()  # type: ignore[attr-defined]
    return losses


def engines(options: Options) -> list[Table]:
    """One row for each engine, one column for each package."""
    packages = list(tiles())
    table = Table("Tiled MLPs under the engines, on two ranks", ["", *packages])
    table.note = f"Largest relative difference of four losses to the untiled run; ✗ above {CLOSE:g}."
    with Ranks() as ranks:
        for title, (engine, lengths) in ROWS.items():
            # DeepSpeed changes torch in its processes.
            name = "DeepSpeed" if engine.startswith("zero") else "others"
            untiled = ranks(name, train, engine, lengths, "untiled")
            found = [ranks(name, train, engine, lengths, package, timeout=60) for package in packages]
            table.add(title, *(judged(difference(losses, untiled), CLOSE) for losses in found))
    return [table]


def difference(found: list[list[float]] | str, untiled: list[list[float]]) -> float | str:
    """Return the largest difference of the losses of the ranks, or how they failed."""
    if isinstance(found, str):
        return found
    return float((torch.tensor(found) / torch.tensor(untiled) - 1).abs().max())
