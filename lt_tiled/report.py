"""What was done to a model, as data, as one line and as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.memory import gib, total_memory
from lt_tiled.modules.feed_forward import mixes_tokens
from lt_tiled.modules.find import walk_all
from lt_tiled.modules.patch import get_patch, get_patches
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.sequence_parallel.attention import calls_attention
from lt_tiled.sequence_parallel.forward import SharedBlock
from lt_tiled.sequence_parallel.sharing import Sharing
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.tiling.weights import sum_dtype

if TYPE_CHECKING:
    from rich.table import Table

LONG = 4
"""A sequence is long if it has so many times more tokens than the hidden size."""


@dataclass(frozen=True)
class TiledModule:
    """A tiled module, or a model that computes its loss in tiles with the path of its head.

    Tokens and tiles are those of its largest call so far, and 0 before its first call.
    """

    path: str
    kind: str
    tokens: int
    tiles: int
    sums: int = 0
    """Bytes of the gradient sums of a mixture of experts, which each of its tiles reads and writes; 0 for others."""
    saves: int = 0
    """How many of these bytes ``accumulate="param"`` saves."""


@dataclass(frozen=True)
class RecomputedBlock:
    """A block with activation checkpointing."""

    path: str
    kind: str
    by_model: bool = False
    """Whether the model's own activation checkpointing recomputed it in a call so far, and lt_tiled left it to that."""
    repeats_attention: bool = False
    """Whether its recompute repeated attention to so many tokens that ``keep`` would save a good part of a step."""


@dataclass(frozen=True)
class SharedSequences:
    """A model whose sequences several ranks share, with its first and its last block."""

    owner: str
    first: str
    last: str
    ranks: int


@dataclass(frozen=True)
class Report:
    """The tiled modules, the blocks with activation checkpointing and the tiled losses of a model."""

    tiled: tuple[TiledModule, ...]
    """MLPs, and what a policy names."""
    blocks: tuple[RecomputedBlock, ...]
    losses: tuple[TiledModule, ...] = ()
    norms: tuple[TiledModule, ...] = ()
    """Norms that ``targets="auto"`` found apart from MLPs."""
    offloaded: OffloadStats | None = None
    """What was offloaded so far, if anything is."""
    shared: tuple[SharedSequences, ...] = ()
    """The models whose sequences several ranks share."""
    memory: int | None = None
    """The bytes of memory of the device, if there are experts and it is an accelerator."""

    @classmethod
    def of(cls, model: nn.Module) -> Report:
        """Return the report of a model."""
        tiled: list[TiledModule] = []
        norms: list[TiledModule] = []
        blocks, losses, offloaded, memory = [], [], None, None
        chains: dict[Sharing, list[str]] = {}
        for path, module in walk_all(model):
            for patch in get_patches(module, TiledPatch):
                if patch.is_leader and not patch.untiled:
                    spec, method = patch.spec, "" if patch.method == "forward" else f".{patch.method}"
                    sums, saves = _sums_of(module, patch)
                    largest = patch.largest
                    path_of_method = (path + method).lstrip(".")
                    row = TiledModule(path_of_method, spec.kind, largest.tokens, largest.tiles, sums, saves)
                    (norms if spec.is_lone_norm else tiled).append(row)
                    memory = total_memory(next(module.parameters()).device) if sums else memory
            if (head := get_patch(module, HeadPatch)) is not None and head.called is not False:
                losses.append(TiledModule(path, head.name, head.largest.tokens, head.largest.tiles))
            if (block := get_patch(module, BlockPatch)) is not None:
                repeats = _repeats_attention(module, block)
                blocks.append(RecomputedBlock(path, type(module).__name__, block.by_others, repeats))
                if block.offload is not None:
                    offloaded = block.offload.offloader.stats
            for part in get_patches(module, SharedBlock):
                chains.setdefault(part.sharing, []).append(path)
        shared = tuple(SharedSequences(s.owner, paths[0], paths[-1], s.size) for s, paths in chains.items())
        return cls(tuple(tiled), tuple(blocks), tuple(losses), tuple(norms), offloaded, shared, memory)

    def summary(self) -> str:
        """Return one line with the number of modules of each class."""
        parts = []
        for what, rows in (
            ("tiles", (*self.tiled, *self.norms)),
            ("tiles the loss of", self.losses),
            ("applies activation checkpointing to", self.blocks),
        ):
            if kinds := Counter(row.kind for row in rows):
                parts.append(f"{what} {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}")
        parts += [f"shares the sequences of {row.owner} between {row.ranks} ranks" for row in self.shared]
        return "lt_tiled " + (" and ".join(parts) or "changes nothing in the model")

    def table(self, peak: str | None = None, steps: int = 0, seconds: float | None = None) -> Table:
        """Return a table with one row for modules that are alike.

        Args:
            peak: The peak memory of a step, as text.
            steps: The number of steps in the offload figures.
            seconds: The duration of these steps.
        """
        from rich.table import Table  # offline images may lack it

        lines = [f"peak memory of a step: {peak}"] if peak else []
        lines += describe_offload(self.offloaded, steps, seconds) if self.offloaded is not None else []
        lines += advise_on_sums(self.tiled, self.memory)
        if any(row.repeats_attention for row in self.blocks):
            lines.append(
                "attention runs twice on long sequences: ActivationCheckpointing(keep='attention') runs it once"
                " and keeps one tensor of the size of the hidden states per block"
            )
        table = Table(title="lt_tiled", caption="\n".join(lines) or None, caption_justify="left")
        table.add_column("what", no_wrap=True)
        table.add_column("modules", no_wrap=True)
        table.add_column("where", overflow="fold")
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("tiles", justify="right", no_wrap=True)
        for what, rows in (("tiled", (*self.tiled, *self.norms)), ("tiled loss", self.losses)):
            alike = Counter((pattern(row.path), row.kind, row.tokens, row.tiles) for row in rows)
            for (path, kind, tokens, tiles), count in alike.items():
                calls = (str(tokens), str(tiles)) if tokens else ("-", "never tiled")
                table.add_row(what, f"{count} x {kind}", path, *calls)
        same = Counter((pattern(row.path), row.kind, row.by_model) for row in self.blocks)
        for (path, kind, by_model), count in same.items():
            by_whom = "by the model itself" if by_model else ""
            table.add_row("activation checkpointing", f"{count} x {kind}", path, by_whom, "")
        for row in self.shared:
            table.add_row("sequence parallelism", f"{row.ranks} ranks", f"{row.first} to {row.last}", "", "")
        if not table.rows:
            table.add_row("nothing")
        return table


def _sums_of(module: nn.Module, patch: TiledPatch) -> tuple[int, int]:
    """Return the bytes of the gradient sums of a mixture of experts, and how many ``accumulate="param"`` saves."""
    sizes, weight = patch.spec.sizes, next(module.parameters(), None)  # FSDP keeps flat weights elsewhere
    if sizes is None or sizes.summed <= sizes.used or weight is None:
        return 0, 0
    dtype = weight.dtype
    nbytes = sizes.summed * sum_dtype(dtype, patch.tiling.accumulate).itemsize
    return nbytes, nbytes - sizes.summed * sum_dtype(dtype, "param").itemsize


def advise_on_sums(tiled: Sequence[TiledModule], memory: int | None) -> list[str]:
    """Return a line that recommends ``accumulate="param"``, if one layer's sums take over a tenth of the memory."""
    largest = max((row for row in tiled if row.saves), key=lambda row: row.sums, default=None)
    if memory is None or largest is None or 10 * largest.sums <= memory:
        return []
    return [
        f"the gradient sums of one {largest.kind} take {gib(largest.sums)}, more than a tenth of {gib(memory)}:"
        f" Tiling(accumulate='param') saves {gib(largest.saves)} of them and rounds after each tile"
    ]


def _repeats_attention(block: nn.Module, patch: BlockPatch) -> bool:
    """Whether the recompute of a block repeated attention that takes at least about a fifth of its forward pass."""
    tokens, hidden_size = patch.longest
    for part in get_patches(block, SharedBlock):
        tokens *= part.sharing.size
    if patch.keep is not None or tokens < max(LONG * hidden_size, 1):
        return False
    return calls_attention(block) or any(mixes_tokens(name, part) for name, part in block.named_modules())


def describe_offload(moved: OffloadStats, steps: int, seconds: float | None = None) -> list[str]:
    """Return lines of text about a run of ``steps`` steps, with the SSD wear if its duration is given."""
    if not moved.cpu_bytes + moved.disk_bytes + moved.over_budget_bytes:
        return ["nothing was offloaded: inputs under 1 MiB, and the last keep_last ones, stay on the device"]
    steps = max(steps, 1)
    cpu = gib(moved.cpu_bytes / steps)
    disk = gib(moved.disk_bytes / steps)
    lines = [f"offloaded per step: {cpu} to CPU memory, {disk} to disk"]
    if moved.over_budget_bytes:
        lines.append(f"kept on the device, no room in the budget: {gib(moved.over_budget_bytes / steps)} per step")
    if moved.disk_bytes:
        lines.append(f"written to disk in all: {gib(moved.disk_bytes)}")
        if seconds:
            wear = moved.disk_bytes / seconds * 86400 / 1e12
            lines.append(f"SSD wear at this rate: {wear:.1f} TB per day; compare with the TBW rating of the drive")
    return lines


def pattern(path: str) -> str:
    """Return ``layers.*.mlp`` for ``layers.3.mlp``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def show(*parts: Any) -> None:
    """Print tables and lines; a file, unlike a terminal, needs no line breaks."""
    from rich.console import Console  # offline images may lack it

    console = Console()
    if not console.is_terminal:
        console.width = 1000
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
