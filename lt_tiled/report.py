"""What was done to a model, as data, as one line and as a table."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.memory import gib
from lt_tiled.modules.find import walk_all
from lt_tiled.modules.patch import get_patch, get_patches
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.sequence_parallel.blocks import SharedBlock
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
    """MLPs, and what a policy names."""
    blocks: tuple[ReportedModule, ...]
    losses: tuple[ReportedModule, ...] = ()
    norms: tuple[ReportedModule, ...] = ()
    """Norms that ``targets="auto"`` found apart from MLPs."""
    offloaded: OffloadStats | None = None
    """What was offloaded so far, if anything is."""
    shared: tuple[tuple[str, int], ...] = ()
    """The models whose sequences several ranks share, and the number of these ranks."""

    @classmethod
    def of(cls, model: nn.Module) -> Report:
        """Return the report of a model."""
        # 1. Modules that run in tiles.
        tiled: list[ReportedModule] = []
        norms: list[ReportedModule] = []
        for path, _, patch in tiled_patches(model):
            if not patch.untiled:
                if patch.method != "forward":
                    path = f"{path}.{patch.method}".lstrip(".")
                row = ReportedModule(path, patch.spec.kind, patch.largest.tokens, patch.largest.tiles)
                (norms if patch.spec.is_lone_norm else tiled).append(row)
        # 2. Losses, blocks, and what is known of all blocks together.
        losses: list[ReportedModule] = []
        blocks: list[ReportedModule] = []
        offloaded: OffloadStats | None = None
        shared: dict[str, int] = {}
        for path, module in walk_all(model):
            if (head := get_patch(module, HeadPatch)) is not None and not head.untiled:
                losses.append(ReportedModule(path, head.name, head.largest.tokens, head.largest.tiles))
            if (block := get_patch(module, BlockPatch)) is not None:
                blocks.append(ReportedModule(path, type(module).__name__))
                if block.offload is not None:
                    offloaded = block.offload.offloader.stats
            for part in get_patches(module, SharedBlock):
                shared[part.door.owner] = part.door.policy.size
        return cls(tuple(tiled), tuple(blocks), tuple(losses), tuple(norms), offloaded, tuple(shared.items()))

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
        parts += [f"shares the sequences of {owner} between {ranks} ranks" for owner, ranks in self.shared]
        return "lt_tiled " + (" and ".join(parts) or "changes nothing in the model")

    def table(self, peak: str | None = None, steps: int = 0) -> Table:
        """Return a table with one row for modules that are alike.

        Args:
            peak: The peak memory of a step, as text.
            steps: The number of steps in the offload figures.
        """
        from rich.table import Column, Table  # offline images may lack it

        # 1. Above the rows their names, below them the figures of a step.
        lines = list[str]()
        if peak:
            lines.append(f"peak memory of a step: {peak}")
        if self.offloaded is not None:
            lines += describe_offload(self.offloaded, steps)
        columns = (
            Column("what", no_wrap=True),
            Column("modules", no_wrap=True),
            Column("where", overflow="fold"),
            Column("tokens", justify="right", no_wrap=True),
            Column("tiles", justify="right", no_wrap=True),
        )
        table = Table(*columns, title="lt_tiled", caption="\n".join(lines) or None, caption_justify="left")
        # 2. Rows of modules, each with the number of those that are alike.
        alike: Counter[tuple[str, str, str, str, str]] = Counter()
        for what, rows in (("tiled", self.tiled + self.norms), ("tiled loss", self.losses)):
            for row in rows:
                tokens = "-"
                tiles = "never tiled"
                if row.tokens:
                    tokens = str(row.tokens)
                    tiles = str(row.tiles)
                alike[what, row.kind, pattern(row.path), tokens, tiles] += 1
        for block in self.blocks:
            alike["activation checkpointing", block.kind, pattern(block.path), "", ""] += 1
        for (what, kind, path, tokens, tiles), count in alike.items():
            table.add_row(what, f"{count} x {kind}", path, tokens, tiles)
        # 3. Rows of models.
        for owner, ranks in self.shared:
            table.add_row("sequence parallelism", f"{ranks} ranks", owner)
        if not table.rows:
            table.add_row("nothing")
        return table


def describe_offload(moved: OffloadStats, steps: int) -> list[str]:
    """Return lines of text about a run of ``steps`` steps."""
    if not moved.cpu_bytes + moved.disk_bytes + moved.over_budget_bytes:
        return ["nothing was offloaded: inputs under 1 MiB, and the last keep_last ones, stay on the device"]
    steps = max(steps, 1)
    cpu = gib(moved.cpu_bytes / steps)
    disk = gib(moved.disk_bytes / steps)
    lines = [f"offloaded per step: {cpu} to CPU memory, {disk} to disk"]
    if moved.over_budget_bytes:
        lines.append(f"kept on the device, no room in the budget: {gib(moved.over_budget_bytes / steps)} per step")
    return lines


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
