"""A plot of memory over a step."""

from __future__ import annotations

from pathlib import Path

from lt_tiled.memory import gib
from lt_tiled.planner.simulate import PARTS, Simulation

_HEX = "4c566a 7b88a1 a3adbf 8fbcbb b5d3d2 ebcb8b 5e81ac d08770 bf616a d8dee9"
COLORS = {part: f"#{color}" for part, color in zip(PARTS, _HEX.split(), strict=True)}
POINTS = 2000
"""The number of moments in a plot."""


def draw_step(run: Simulation, path: str | Path, memory: int | None = None) -> None:
    """Plot memory over a step, stacked by part.

    Args:
        run: A simulated step.
        path: A file in a format of matplotlib, such as ``.png``, ``.svg`` or ``.pdf``.
        memory: The memory of a device in bytes, drawn as a line.
    """
    from matplotlib.figure import Figure

    # Of each interval, the moment with the most bytes stands for all.
    rows = run.over_time()
    totals = [sum(values) for values in zip(*rows.values(), strict=True)]
    step = -(-len(totals) // POINTS)
    moments = list[int]()
    for low in range(0, len(totals), step):
        moments.append(max(range(low, min(low + step, len(totals))), key=totals.__getitem__))
    figure = Figure(figsize=(6, 4), layout="constrained", dpi=150)
    axis = figure.subplots()
    stack = [[row[moment] / 2**30 for moment in moments] for row in rows.values()]
    axis.stackplot(moments, stack, colors=[COLORS[part] for part in rows], labels=list(rows))
    for phase, moment in run.phases.items():
        x = moment - run.phases["forward"]
        axis.axvline(x, color="black", linewidth=0.5, linestyle=":")
        axis.text(x, run.peak / 2**30, f" {phase}", fontsize=7, ha="right" if phase == "optimizer" else "left")
    if memory:
        axis.axhline(memory / 2**30, color="black", linewidth=1, linestyle="--")
    axis.set(title=f"peak {gib(run.peak)}", xticks=[], xlabel="allocations, in their order", ylabel="GiB")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path)
