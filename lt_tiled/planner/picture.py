"""A plot of memory over a step."""

from __future__ import annotations

from pathlib import Path

from lt_tiled.memory import gib
from lt_tiled.planner.simulate import Plan

POINTS = 2000
"""The number of moments in a plot."""


def draw_step(found: Plan, path: str | Path, memory: int | None = None) -> None:
    """Plot memory over a step, stacked by part, in a format of matplotlib such as ``.png``, ``.svg`` or ``.pdf``.

    ``memory`` is that of a device in bytes, drawn as a line.
    """
    from matplotlib.figure import Figure

    rows = found.over_time()
    start = found.phases["forward"]
    # Equal distances, and the moment of the peak.
    moments = sorted({*range(0, found.end - start, 1 + (found.end - start) // POINTS), found.peak_at - start})
    figure = Figure(figsize=(6, 4), layout="constrained", dpi=150)
    axis = figure.subplots()
    stack = [[row[moment] / 2**30 for moment in moments] for row in rows.values()]
    axis.stackplot(moments, stack, labels=list(rows))
    for phase, moment in found.phases.items():
        axis.axvline(moment - start, color="black", linewidth=0.5, linestyle=":")
        axis.text(moment - start, found.peak / 2**30, f" {phase}", fontsize=7)
    if memory:
        axis.axhline(memory / 2**30, color="black", linewidth=1, linestyle="--")
    axis.set(title=f"peak {gib(found.peak)}", xticks=[], xlabel="allocations, in their order", ylabel="GiB")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path)
