"""The differences of two steps, with what rounding allows: one row for modules that are alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lt_tiled.report import pattern

FACTOR = 4.0
"""How much larger than that of the untiled step an error may be: both are sums of the same terms in another order."""
LOSS, EVALUATION = "loss", "loss in evaluation mode"


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
class Differences:
    """Compares the values of steps."""

    eps: float
    """The precision of the run."""
    gradients: Sequence[str]
    """The names of values that are gradients."""
    prefix: str
    """Left out of the paths."""

    def rows(
        self,
        untiled: dict[str, Tensor],
        tiled: dict[str, Tensor],
        reference: dict[str, Tensor],
        names: Sequence[str],
    ) -> tuple[Row, ...]:
        """Return the worst weight of modules that are alike, the loss and the buffers.

        Args:
            untiled: The values of the untiled step.
            tiled: Those of the tiled step.
            reference: Those of the reference; empty if there is none.
            names: What is compared.
        """
        base = reference or untiled
        sizes = self._sizes(base, names)
        before = {name: _distance(untiled[name], base[name]) / sizes[name] for name in names}
        after = {name: _distance(tiled[name], base[name]) / sizes[name] for name in names}
        # Models compute parts in float32 whatever their dtype is, and a weight of few numbers may have no error by
        # chance.
        usual = max(median(before.values()), 4 * torch.finfo(torch.float32).eps)
        limit = max(1e-4, 10 * self.eps)
        rows: dict[str, Row] = {}
        for name in names:
            allowed = min(FACTOR * max(before[name], usual), 4 * limit) if reference else limit
            path = self._path(name)
            row = Row(path, before[name] if reference else math.nan, after[name], allowed)
            rows[path] = worst([rows.get(path, row), row])
        return tuple(rows.values())

    def _sizes(self, base: dict[str, Tensor], names: Sequence[str]) -> dict[str, float]:
        """Return what errors are relative to. Values that are almost zero count as larger.

        Gradients and losses count relative to all gradients; other floating-point numbers, which are buffers, relative
        to all of these.
        """
        least = dict.fromkeys((*self.gradients, LOSS, EVALUATION), 1e-3 * norm_of(base, self.gradients))
        floats = [name for name in names if name not in least and base[name].is_floating_point()]
        least |= dict.fromkeys(floats, 1e-3 * norm_of(base, floats))
        return {name: max(norm_of(base, [name]), least.get(name, 0.0), 1e-30) for name in names}

    def _path(self, name: str) -> str:
        module = name.rpartition(".")[0] if name in self.gradients else ""
        return pattern(module or name).removeprefix(self.prefix)


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
