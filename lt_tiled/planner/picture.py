"""A plot of memory over a step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from lt_tiled.memory import gib
from lt_tiled.planner.simulate import PARTS, Simulation

_HEX = "4c566a 7b88a1 a3adbf 8fbcbb b5d3d2 ebcb8b 5e81ac d08770 bf616a d8dee9"
COLORS = {part: f"#{color}" for part, color in zip(PARTS, _HEX.split(), strict=True)}
_INK = "#2e3440"
POINTS = 2000
"""The number of moments in a plot."""


def draw_step(runs: Mapping[str, Simulation], path: str | Path, memory: int | None = None) -> None:
    """Plot memory over a step, stacked by part, with one panel for each run and one scale.

    Args:
        runs: Simulated steps, by title.
        path: A ``.png``, ``.svg`` or ``.pdf`` file; errors as of :func:`check_format`.
        memory: The memory of a device in bytes, drawn as a line.
    """
    check_format(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(max(6.0, 4.2 * len(runs)), 4), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    top = max([r.peak for r in runs.values()] + ([memory] if memory else [])) / 2**30
    shown = set[str]()
    for axis, (title, run) in zip(axes, runs.items(), strict=True):
        rows = _thinned(run.over_time())
        shown |= rows.keys()
        count = len(next(iter(rows.values())))
        stack = [[value / 2**30 for value in row] for row in rows.values()]
        axis.stackplot(range(count), stack, colors=[COLORS[part] for part in rows])
        axis.set_title(f"{title}\npeak {gib(run.peak)}", fontsize=10)
        axis.set_xticks([])
        axis.set_xlabel("allocations, in their order", fontsize=8)
        start, end = run.phases["forward"], run.end
        for phase, moment in run.phases.items():
            x, side = (moment - start) / max(end - start, 1) * count, "right" if phase == "optimizer" else "left"
            axis.axvline(x, color=_INK, linewidth=0.5, linestyle=":")
            axis.text(x, top * 1.02, f" {phase}", fontsize=7, va="bottom", ha=side)
        axis.set_ylim(0, top * 1.25)
        if memory:
            axis.axhline(memory / 2**30, color=_INK, linewidth=1, linestyle="--")
    axes[0].set_ylabel("GiB")
    parts = [Patch(color=color, label=part) for part, color in COLORS.items() if part in shown]
    figure.legend(handles=parts, loc="outside lower center", ncols=min(len(parts), 5), fontsize=8, frameon=False)
    figure.savefig(path)


def check_format(path: str | Path) -> None:
    """Check that a plot can be written, before any work is done for it."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("Plots need the package matplotlib: pip install 'lt-tiled[plot]'.")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{str(path)!r} must end in .png, .svg or .pdf.")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"The directory of {str(path)!r} does not exist: create it first.")


def _thinned(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return at most :data:`POINTS` moments: of each interval, the moment with the most bytes."""
    totals = [sum(values) for values in zip(*rows.values(), strict=True)]
    step = -(-len(totals) // POINTS)
    moments = range(len(totals))
    kept = [max(moments[low : low + step], key=totals.__getitem__) for low in moments[::step]]
    return {part: [row[i] for i in kept] for part, row in rows.items()}
