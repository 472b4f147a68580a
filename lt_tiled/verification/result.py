"""The result of :func:`lt_tiled.verify`: the errors of the gradients of two steps, what is allowed, and the verdict."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lt_tiled.report import pattern

_FACTOR = 4.0
"""How much larger than that of the untiled step an error may be: both are sums of the same terms in another order."""


@dataclass(frozen=True)
class Row:
    """The worst weight of the modules that are alike, or the loss. Errors are relative to the untiled step."""

    path: str
    untiled: float  # from rounded weights
    tiled: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error of the tiled step is allowed; one that is not a number is not."""
        return self.tiled <= self.allowed

    @property
    def rank(self) -> tuple[bool, float]:
        """What is larger for the worse of two rows."""
        return not self.passed, self.tiled / self.allowed


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`, the same on all ranks."""

    title: str
    losses: tuple[float, float]  # without lt_tiled and with it
    norms: tuple[float, float]  # of all gradients, without lt_tiled and with it
    rows: tuple[Row, ...]
    tiles: dict[str, int]
    """The number of tiles of each MLP and each loss that is tiled, by path: 0 if it was not called."""

    @property
    def worst(self) -> Row:
        """The row whose error is the largest relative to what is allowed."""
        return max(self.rows, key=lambda row: row.rank)

    @property
    def not_tiled(self) -> list[str]:
        """The paths of modules that were to be tiled and ran in one tile, or not at all."""
        return [path for path, count in self.tiles.items() if count < 2]

    @property
    def passed(self) -> bool:
        """Whether all errors are allowed, and something ran in tiles."""
        return self.verdict.startswith("pass")

    @property
    def verdict(self) -> str:
        """A line that begins with ``pass`` or ``fail``, with the reason and the remedy."""
        row = self.worst
        figures = f"error {row.tiled:.1e} of {row.allowed:.1e} allowed"
        if not row.passed:
            return (
                f"fail: {row.path}, {figures}: turn off tiling, activation_checkpointing and loss in turn to find the"
                " cause; if the error without lt_tiled is as large, verify in 64-true"
            )
        if self.tiles and len(self.not_tiled) == len(self.tiles):
            return "fail: nothing ran in several tiles: raise the sequence length, or set Tiling(num_shards=...)"
        note = ""
        if not self.tiles:
            note = "; no MLP and no loss is tiled, so only the rest, such as activation checkpointing, is verified"
        elif self.not_tiled:
            alike = Counter(map(pattern, self.not_tiled))
            note = "; not tiled, so not verified: " + ", ".join(f"{count} x {path}" for path, count in alike.items())
        return f"pass: the largest {figures}, in {row.path}{note}"

    def __str__(self) -> str:
        width = max(len(f"error of {row.path}") for row in self.rows)
        lines = [self.title, f"{'':{width}} {'without lt_tiled':>17} {'with lt_tiled':>14} {'allowed':>9}"]
        for name, (before, after) in (("loss", self.losses), ("gradient norm", self.norms)):
            lines.append(f"{name:{width}} {before:>17.6g} {after:>14.6g}")
        lines.append(f"{'tiles':{width}} {1:>17} {max(self.tiles.values(), default='none'):>14}")
        for row in self.rows:
            name = f"error of {row.path}"
            lines.append(f"{name:{width}} {row.untiled:>17.1e} {row.tiled:>14.1e} {row.allowed:>9.1e}")
        lines.append("error: the change of the gradient, relative to its norm; without lt_tiled by rounding of weights")
        lines.append(self.verdict)
        return "\n".join(lines)


@dataclass(frozen=True)
class Measured:
    """What a step gave: the loss, and gradients by name on the CPU."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def norm(self) -> float:
        return math.hypot(*map(_norm, self.gradients.values()))

    def errors(self, base: Measured) -> dict[str, float]:
        """Return the errors of the gradients and the loss; small ones count as a thousandth of all gradients."""
        least = 1e-3 * base.norm
        found = dict[str, float]()
        for name, gradient in base.gradients.items():
            difference = _norm(self.gradients[name].double() - gradient.double())
            found[name] = difference / max(_norm(gradient), least)
        return found | {"loss": abs(self.loss - base.loss) / max(abs(base.loss), least)}


def compare(untiled: Measured, rounded: Measured, tiled: Measured, eps: float) -> tuple[Row, ...]:
    """Return a row for the loss, and for the worst weight of modules that are alike.

    ``rounded`` is the untiled step from rounded weights, and ``eps`` the precision of the run.

    Raises:
        ValueError: If there are no gradients to compare.
    """
    if not untiled.norm:
        raise ValueError("The step has no gradients: use a model and a batch with a loss to train on.")
    # 1. What is allowed. Models compute parts in float32 whatever their dtype is, and a weight of few numbers may have
    # no error by chance.
    before = rounded.errors(untiled)
    usual = max(median(before.values()), 4 * torch.finfo(torch.float32).eps)
    cap = max(4e-4, 40 * eps)
    # 2. The errors. Of modules that are alike, the worst one stands for all.
    rows = dict[str, Row]()
    for name, error in tiled.errors(untiled).items():
        path = pattern(name.rpartition(".")[0] or name)
        row = Row(path, before[name], error, min(_FACTOR * max(before[name], usual), cap))
        rows[path] = max(rows.get(path, row), row, key=lambda row: row.rank)
    return tuple(rows.values())


def _norm(value: Tensor) -> float:
    return float(value.double().norm())
