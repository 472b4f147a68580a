"""Memory over a step, and against the length, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_tiled.planner.plan import gib
from lt_tiled.planner.simulate import Simulation

COLORS = {
    "weights": "#4c566a",
    "gradients": "#7b88a1",
    "optimizer": "#a3adbf",
    "gathered": "#8fbcbb",
    "communication": "#b5d3d2",
    "boundaries": "#ebcb8b",
    "attention": "#5e81ac",
    "MLP": "#d08770",
    "loss": "#bf616a",
    "rest": "#d8dee9",
}
POINTS = 2000
"""Moments that a picture shows; of those between two, the highest."""


def draw_step(runs: Mapping[str, Simulation], path: str | Path, memory: int | None = None) -> None:
    """Memory over a step, stacked by what holds it, one panel for each run, all to the same scale.

    Args:
        runs: By title, simulated or recorded ones.
        path: A file whose ending names the format: ``.png``, ``.svg``, ``.pdf``.
        memory: Bytes of a device, drawn as a line.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the ending names no format.
    """
    figure, axes = _panels(len(runs), path)
    top = max([r.peak for r in runs.values()] + ([memory] if memory else [])) / 2**30
    for axis, (title, run) in zip(axes, runs.items(), strict=True):
        rows = _thinned(run.over_time())
        width = len(next(iter(rows.values())))
        axis.stackplot(
            range(width), [[v / 2**30 for v in row] for row in rows.values()], colors=[COLORS[p] for p in rows]
        )
        axis.set_title(f"{title}\npeak {gib(run.peak)}", fontsize=10)
        axis.set_xticks([])
        start, end = run.phases["forward"], run.end
        for phase, moment in run.phases.items():
            x = (moment - start) / max(end - start, 1) * width
            axis.axvline(x, color="#2e3440", linewidth=0.5, linestyle=":")
            axis.text(
                x, top * 1.02, f" {phase}", fontsize=7, va="bottom", ha="left" if phase != "optimizer" else "right"
            )
        axis.set_ylim(0, top * 1.25)
        if memory:
            axis.axhline(memory / 2**30, color="#2e3440", linewidth=1, linestyle="--")
    axes[0].set_ylabel("GiB")
    shown = [part for part in COLORS if any(part in r.over_time() for r in runs.values())]
    figure.legend(
        [_patch(COLORS[part]) for part in shown],
        shown,
        loc="outside lower center",
        ncols=min(len(shown), 5),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)


def draw_lengths(peaks: Mapping[str, Sequence[tuple[int, int]]], path: str | Path, memory: int | None = None) -> None:
    """The peak against the length of a sequence, one line for each combination of features.

    Args:
        peaks: By the combination's name, pairs of tokens and bytes.
        path: A file whose ending names the format.
        memory: Bytes of a device, drawn as a line.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the ending names no format.
    """
    figure, (axis,) = _panels(1, path)
    for name, points in peaks.items():
        axis.plot([t for t, _ in points], [b / 2**30 for _, b in points], marker="o", markersize=3, label=name)
    if memory:
        axis.axhline(memory / 2**30, color="#2e3440", linewidth=1, linestyle="--", label=gib(memory))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("tokens of a sequence")
    axis.set_ylabel("predicted peak, GiB")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def check_format(path: str | Path) -> None:
    """Refuse a picture that could not be written, before any work is done for it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the ending names no format, or the directory is not there.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("Pictures need the package matplotlib: pip install 'lt-tiled[plot]'.")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{str(path)!r} must end in .png, .svg or .pdf.")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{str(path)!r} is in a directory that is not there: make it first.")


def _panels(count: int, path: str | Path) -> tuple[Any, Sequence[Any]]:
    check_format(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.2 * count), 4), layout="constrained", dpi=150)
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def _patch(color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color)


def _thinned(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    """At most :data:`POINTS` moments: of each run of moments, the one where all parts together are highest."""
    totals = [sum(values) for values in zip(*rows.values(), strict=True)]
    width = -(-len(totals) // POINTS)
    kept = [
        max(range(low, min(low + width, len(totals))), key=totals.__getitem__) for low in range(0, len(totals), width)
    ]
    return {part: [row[i] for i in kept] for part, row in rows.items()}
