"""The result of :func:`lt_tiled.verify`: the figures of two steps, the errors of their gradients, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lt_tiled.memory import gib
from lt_tiled.verification.rows import FACTOR, Row, worst

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Step:
    """The figures of a step on one rank."""

    loss: float
    norm: float
    """The norm of all gradients."""
    flops: int
    peak: int
    """The peak of the bytes that the step allocates."""
    seconds: float
    """The duration of the forward and backward pass."""


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`, the same on all ranks."""

    title: str
    reference: str
    """What errors are relative to."""
    untiled: Step
    tiled: Step
    rows: tuple[Row, ...]
    tiles: int | None
    """The most tiles of an MLP or a loss; ``None`` if there is none that is tiled."""
    not_tiled: tuple[str, ...] = ()
    """Modules that were to be tiled and ran in one tile, or not at all."""
    draws: bool = False
    """Whether a step without dropout draws random numbers, which tiles draw in another order."""
    unrepeated: Row | None = None
    """The largest difference between two untiled steps, if they are not the same."""

    @property
    def worst(self) -> Row:
        """The row whose error is the largest relative to what is allowed."""
        return worst(self.rows)

    @property
    def passed(self) -> bool:
        """Whether all errors are allowed, and something ran in tiles."""
        return all(row.passed for row in self.rows) and (self.tiles is None or self.tiles > 1)

    @property
    def verdict(self) -> str:
        """One line: pass or fail, why, and what to do next."""
        failed, unrepeated = self.worst, self.unrepeated
        figures = f"error {failed.tiled:.1e} of {failed.allowed:.1e} allowed"
        if self.passed:
            others = f"; not tiled, so not verified: {', '.join(self.not_tiled)}" if self.not_tiled else ""
            if self.tiles is None:
                others = (
                    "; no MLP and no loss is tiled, so only the rest, such as activation checkpointing, is verified"
                )
            return f"pass: the largest {figures}, in {failed.path}{others}"
        if all(row.passed for row in self.rows):
            return "fail: nothing ran in several tiles: raise the sequence length, or set Tiling(num_shards=...)"
        remedy = "turn off tiling, checkpointing, loss one by one to find the cause, and report it with this table"
        if failed.tiled <= FACTOR * failed.untiled:
            remedy = "the untiled step is as far off: compare with it (reference=False), or verify in 64-true"
        if self.draws:
            remedy = "the step draws random numbers without dropout, which tiles draw in another order: turn that off"
        if unrepeated:
            remedy = (
                f"two untiled steps differ by {unrepeated.tiled:.1e} in {unrepeated.path}: they read what steps change"
                " and what is not restored between them, such as tensors in lists, files or the clock"
            )
        return f"fail: {failed.path}, {figures}: {remedy}"

    def table(self) -> Table:
        """Return the figures of both steps, and the errors of their gradients."""
        from rich.table import Table  # offline images may lack it

        table = Table(
            title=self.title,
            caption=f"error: the difference from {self.reference}, relative to its norm",
            caption_justify="left",
        )
        table.add_column("", overflow="fold")
        for name in ("without lt_tiled", "with lt_tiled", "allowed"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, show in (
            ("loss", lambda step: f"{step.loss:.6g}"),
            ("gradient norm", lambda step: f"{step.norm:.6g}"),
            ("FLOPs", lambda step: f"{step.flops:.3e}"),
            ("peak memory", lambda step: gib(step.peak)),
            ("time", lambda step: f"{step.seconds:.3f} s"),
        ):
            table.add_row(name, show(self.untiled), show(self.tiled))
        table.add_row("tiles", "1", str(self.tiles or "none"))
        table.add_section()
        for row in self.rows:
            untiled = "-" if math.isnan(row.untiled) else f"{row.untiled:.1e}"
            style = None if row.passed else "bold red"
            table.add_row(f"error of {row.path}", untiled, f"{row.tiled:.1e}", f"{row.allowed:.1e}", style=style)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=1000)
        with console.capture() as captured:
            console.print(self.table())
        return f"{captured.get()}{self.verdict}"
