"""What was done to a model, as data, as one line and as a table."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.memory import gib
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import get_patch
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.tiling.patch import tiled_patches

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class ReportedModule:
    """A tiled module, a block with activation checkpointing, or a model that computes its loss in tiles.

    Tokens and tiles are those of its largest call in tiles so far, and 0 before its first call.
    """

    path: str
    kind: str
    tokens: int = 0
    tiles: int = 0


@dataclass(frozen=True)
class Report:
    """The tiled modules, the blocks with activation checkpointing and the tiled losses of a model."""

    tiled: tuple[ReportedModule, ...]
    blocks: tuple[ReportedModule, ...]
    losses: tuple[ReportedModule, ...] = ()
    norms: tuple[ReportedModule, ...] = ()
    """Norms that ``targets="auto"`` found apart from MLPs."""
    offloaded: OffloadStats | None = None
    """What was offloaded so far, if anything is."""

    @classmethod
    def of(cls, model: nn.Module) -> Report:
        # 1. Modules that run in tiles.
        tiled: list[ReportedModule] = []
        norms: list[ReportedModule] = []
        for path, _, patch in tiled_patches(model):
            if not patch.untiled:
                if patch.method != "forward":
                    path = f"{path}.{patch.method}".lstrip(".")
                row = ReportedModule(path, patch.kind, patch.largest.tokens, patch.largest.tiles)
                (norms if patch.is_lone_norm else tiled).append(row)
        # 2. Losses, blocks, and what is known of all blocks together.
        losses: list[ReportedModule] = []
        blocks: list[ReportedModule] = []
        offloaded: OffloadStats | None = None
        for path, module in walk(model):
            if (head := get_patch(module, HeadPatch)) is not None and not head.untiled:
                losses.append(ReportedModule(path, head.name, head.largest.tokens, head.largest.tiles))
            if (block := get_patch(module, BlockPatch)) is not None:
                blocks.append(ReportedModule(path, type(module).__name__))
                if block.offloader is not None:
                    offloaded = block.offloader.stats
        return cls(tuple(tiled), tuple(blocks), tuple(losses), tuple(norms), offloaded)

    def summary(self) -> str:
        """Return one line with the number of modules of each class."""
        parts = []
        for what, rows in (
            ("tiles", self.tiled + self.norms),
            ("tiles the loss of", self.losses),
            ("applies activation checkpointing to", self.blocks),
        ):
            if kinds := Counter(row.kind for row in rows):
                parts.append(f"{what} {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}")
        return "lt_tiled " + (" and ".join(parts) or "changes nothing in the model")

    def table(self, peak: str | None = None, steps: int = 0) -> Table:
        """Return a table with one row for modules that are alike.

        Args:
            peak: The peak memory of a step, as text.
            steps: The number of steps in the offload figures.
        """
        from rich.table import Table  # offline images may lack it

        # 1. Below the rows, the figures of a step.
        lines: list[str] = []
        if peak:
            lines.append(f"peak memory of a step: {peak}")
        if (moved := self.offloaded) is not None:
            steps = max(steps, 1)
            lines.append(
                f"offloaded per step: {gib(moved.cpu_bytes / steps)} to CPU memory, {gib(moved.disk_bytes / steps)} to"
                f" disk; {gib(moved.over_budget_bytes / steps)} found no room in the budget"
            )
        table = Table(title="lt_tiled", caption="\n".join(lines), caption_justify="left")
        for column in ("what", "modules", "where"):
            table.add_column(column, overflow="fold")
        for column in ("tokens", "tiles"):
            table.add_column(column, justify="right")
        # 2. A row for modules that are alike.
        alike: Counter[tuple[str, ...]] = Counter()
        for what, rows in (("tiled", self.tiled + self.norms), ("tiled loss", self.losses)):
            for row in rows:
                alike[what, row.kind, pattern(row.path), str(row.tokens or "-"), str(row.tiles or "never tiled")] += 1
        for row in self.blocks:
            alike["activation checkpointing", row.kind, pattern(row.path)] += 1
        for (what, kind, *rest), count in alike.items():
            table.add_row(what, f"{count} x {kind}", *rest)
        return table


def pattern(path: str) -> str:
    """Return ``layers.*.mlp`` for ``layers.3.mlp``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def show(table: Table) -> None:
    """Print a table; a file, unlike a terminal, needs no line breaks."""
    from rich.console import Console  # offline images may lack it

    console = Console()
    if not console.is_terminal:
        console.width = 1000
    console.print(table)
