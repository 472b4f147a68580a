"""What was done to a model, as rows, as a line and as a table."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from rich.table import Table
from torch import nn

from lt_tiled.checkpointing import BlockMark
from lt_tiled.loss.transformers import HeadMark
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import get_mark, get_marks
from lt_tiled.offload.stats import OffloadStats
from lt_tiled.tiling.state import TileMark


@dataclass(frozen=True)
class TiledModule:
    """One tiled module, with its largest call so far (0 tokens: not called)."""

    path: str
    kind: str
    tokens: int
    tiles: int
    widths: tuple[int, int] | None = None
    """Of the hidden states and between the projections, where the module is a feed-forward part that shows them."""
    weight_bytes: int = 0
    """Of all ranks together where the weights are sharded."""


@dataclass(frozen=True)
class TiledLoss:
    """One model that computes its loss in tiles, with the largest call so far."""

    path: str
    """Of its head."""
    kind: str
    tokens: int
    tiles: int


@dataclass(frozen=True)
class CheckpointedBlock:
    """One checkpointed block."""

    path: str
    kind: str


@dataclass(frozen=True)
class Report:
    """The tiled modules, tiled losses and checkpointed blocks of a model."""

    tiled: tuple[TiledModule, ...]
    blocks: tuple[CheckpointedBlock, ...]
    losses: tuple[TiledLoss, ...] = ()
    offloaded: OffloadStats | None = None
    """What offloading did so far, if there is any."""

    @classmethod
    def of(cls, model: nn.Module) -> Report:
        """Read the marks of a model."""
        tiled, blocks, losses, offloaded = [], [], [], None
        for path, module in [("", model), *walk(model)]:
            for mark in get_marks(module, TileMark):
                if not mark.learned.untiled:
                    found, method = mark.found, "" if mark.method == "forward" else f".{mark.method}"
                    where = (path + method).lstrip(".")
                    row = TiledModule(where, found.kind, *mark.learned.largest, found.widths, found.weight_bytes)
                    tiled.append(row)
            if (head := get_mark(module, HeadMark)) is not None:
                losses.append(TiledLoss(path, head.name, *head.learned.largest))
            if (block := get_mark(module, BlockMark)) is not None:
                blocks.append(CheckpointedBlock(path, type(module).__name__))
                if block.offload is not None:
                    offloaded = block.offload.offloader.so_far()
        return cls(tuple(tiled), tuple(blocks), tuple(losses), offloaded)

    def summary(self) -> str:
        """One line: how many modules of which classes."""
        parts = [
            f"{what} {', '.join(f'{n} x {kind}' for kind, n in Counter(row.kind for row in rows).items())}"
            for what, rows in (
                ("tiles", self.tiled),
                ("tiles the losses of", self.losses),
                ("checkpoints", self.blocks),
            )
            if rows
        ]
        return "lt_tiled " + (" and ".join(parts) or "leaves the model as it is")

    def table(self, peak: str | None = None, steps: int = 0, seconds: float | None = None) -> Table:
        """A table with one row for modules that are alike.

        Args:
            peak: The peak memory of a step, in words.
            steps: How many steps the figures of offloading are of.
            seconds: How long they took.
        """
        lines = [f"peak memory of a step: {peak}"] if peak else []
        lines += self.offloaded.describe(steps, seconds) if self.offloaded is not None else []
        table = Table(title="lt_tiled", caption="\n".join(lines) or None, caption_justify="left")
        table.add_column("what", no_wrap=True)
        table.add_column("modules", no_wrap=True)
        table.add_column("where", overflow="fold")
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("tiles", justify="right", no_wrap=True)
        for what, rows in (("tiled", self.tiled), ("tiled loss", self.losses)):
            alike = Counter((pattern(row.path), row.kind, row.tokens, row.tiles) for row in rows)
            for (path, kind, tokens, tiles), count in alike.items():
                table.add_row(
                    what, f"{count} x {kind}", path, *((str(tokens), str(tiles)) if tokens else ("-", "never cut"))
                )
        for (path, kind), count in Counter((pattern(row.path), row.kind) for row in self.blocks).items():
            table.add_row("checkpointed", f"{count} x {kind}", path, "", "")
        if not table.rows:
            table.add_row("nothing", "", "", "", "")
        return table


def pattern(path: str) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
