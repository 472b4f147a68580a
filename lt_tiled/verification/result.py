"""The result of :func:`lt_tiled.verify`: the figures of two steps, the errors of their gradients, and the verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_tiled.memory import gib
from lt_tiled.report import pattern

if TYPE_CHECKING:
    from rich.table import Table


_FACTOR = 4.0
"""How much larger than that of the untiled step an error may be: both are sums of the same terms in another order."""
LOSS, EVALUATION = "loss", "loss in evaluation mode"


@dataclass(frozen=True)
class Step:
    """The figures of a step on one rank."""

    loss: float
    norm: float
    """The norm of all gradients."""
    flops: int
    peak: int
    """The peak of the bytes that the step allocates."""


@dataclass(frozen=True)
class Row:
    """The worst weight of the modules that are alike, the loss, or a buffer. Errors are relative to the reference."""

    path: str
    untiled: float
    tiled: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error of the tiled step is allowed; one that is not a number is not."""
        return self.tiled <= self.allowed


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
        row = self.worst
        figures = f"error {row.tiled:.1e} of {row.allowed:.1e} allowed"
        if self.passed:
            note = f"; not tiled, so not verified: {', '.join(self.not_tiled)}" if self.not_tiled else ""
            if self.tiles is None:
                note = "; no MLP and no loss is tiled, so only the rest, such as activation checkpointing, is verified"
            return f"pass: the largest {figures}, in {row.path}{note}"
        if all(row.passed for row in self.rows):
            return "fail: nothing ran in several tiles: raise the sequence length, or set Tiling(num_shards=...)"
        remedy = "turn off tiling, checkpointing, loss one by one to find the cause, and report it with this table"
        if row.tiled <= _FACTOR * row.untiled:
            remedy = "the untiled step is as far off: compare with it (reference=False), or verify in 64-true"
        if self.draws:
            remedy = "the step draws random numbers without dropout, which tiles draw in another order: turn that off"
        return f"fail: {row.path}, {figures}: {remedy}"

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


def compare(
    untiled: dict[str, Tensor],
    tiled: dict[str, Tensor],
    reference: dict[str, Tensor],
    names: Sequence[str],
    gradients: Sequence[str],
    eps: float,
) -> tuple[Row, ...]:
    """Return a row for the worst weight of modules that are alike, and rows for the loss and the buffers.

    Args:
        untiled: The values of the untiled step by name.
        tiled: Those of the tiled step.
        reference: Those of the step in higher precision, or an empty dictionary.
        names: What to compare.
        gradients: Which of these are gradients.
        eps: The precision of the run.
    """
    base = reference or untiled
    sizes = _sizes(base, names, gradients)
    before = {name: _distance(untiled[name], base[name]) / sizes[name] for name in names}
    # Models compute parts in float32 whatever their dtype is; a weight of few numbers may have no error by chance.
    usual = max(median(before.values()), 4 * torch.finfo(torch.float32).eps)
    limit = max(1e-4, 10 * eps)
    rows: dict[str, Row] = {}
    for name in names:
        error = _distance(tiled[name], base[name]) / sizes[name]
        path = pattern((name in gradients and name.rpartition(".")[0]) or name)
        row = Row(path, math.nan, error, limit)
        if reference:
            row = Row(path, before[name], error, min(_FACTOR * max(before[name], usual), 4 * limit))
        rows[path] = worst([rows.get(path, row), row])
    return tuple(rows.values())


def _sizes(base: dict[str, Tensor], names: Sequence[str], gradients: Sequence[str]) -> dict[str, float]:
    """Return what errors are relative to. Values that are almost zero count as larger.

    Gradients and losses count relative to all gradients; other floating-point numbers, which are buffers, relative to
    all of these.
    """
    least = dict.fromkeys((*gradients, LOSS, EVALUATION), 1e-3 * norm_of(base, gradients))
    floats = [name for name in names if name not in least and base[name].is_floating_point()]
    least |= dict.fromkeys(floats, 1e-3 * norm_of(base, floats))
    return {name: max(norm_of(base, [name]), least.get(name, 0.0), 1e-30) for name in names}


def worst(rows: Iterable[Row]) -> Row:
    """Return the row whose error is the largest relative to what is allowed."""
    return max(rows, key=lambda row: (not row.passed, row.tiled / row.allowed))


def norm_of(values: dict[str, Tensor], names: Iterable[str]) -> float:
    """Return the norm of some values together."""
    return math.hypot(*(float(values[name].double().norm()) for name in names))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def listed(paths: Sequence[str], among: Sequence[str]) -> tuple[str, ...]:
    """Return paths for a message: ``layers.1.mlp``, or ``3 of 8 layers.*.mlp`` for several that are alike."""
    alike, everything = Counter(map(pattern, paths)), Counter(map(pattern, among))
    few = [path for path in paths if alike[pattern(path)] == 1]
    return (*few, *(f"{n} of {everything[path]} {path}" for path, n in alike.items() if n > 1))
