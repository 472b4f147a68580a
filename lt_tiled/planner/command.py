"""``lt-tiled plan``: predict, print and plot, from the configuration of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lt_tiled.memory import gib
from lt_tiled.planner.job import make_job
from lt_tiled.planner.search import cheapest, longest
from lt_tiled.planner.simulate import Plan, plan
from lt_tiled.planner.speed import GPU, MACHINES, predict
from lt_tiled.policies import check_count, parse_bytes

POINTS = 2000
"""The number of moments in a plot."""


def run_plan(
    trainer: Mapping[str, Any],
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    seq: int | None = None,
    memory: int | str | None = None,
    devices: int | None = None,
    find: Literal["max-seq", "settings"] | None = None,
    plot: str | None = None,
    gpu: GPU = "h100",
) -> None:
    """Predict the memory of a training step from its configuration, without weights, a GPU or a network.

    Args:
        trainer: The arguments of the Trainer.
        model: The module, on the meta device.
        datamodule: Its data, of which one batch is read.
        seq: The sequence length; by default that of the data.
        memory: The memory of each device: bytes, or text such as ``"80GiB"``.
        devices: The number of ranks; by default that of the Trainer.
        find: ``max-seq`` finds the longest sequence that fits, ``settings`` the cheapest settings with which the
            sequence length fits.
        plot: A plot (``.png``, ``.svg``, ``.pdf``) of memory over the step.
        gpu: The GPU of the predicted speed.

    Raises:
        ValueError: If an argument is not understood, or nothing fits.
    """
    check_count("seq", seq, None)
    check_count("devices", devices, None)
    limit = None
    if memory is not None:
        limit = parse_bytes(memory, "memory")
    elif find is not None:
        raise ValueError(f"find={find!r} needs the memory of a device: pass --memory, such as --memory 80GiB.")
    # 1. Predict, or search.
    job = make_job(model, datamodule, trainer, devices)
    if find is None or limit is None:
        found = plan(job, seq)
    elif find == "max-seq":
        found = longest(job, limit)
    else:
        found = cheapest(job, limit, seq)
    # 2. Say what was found, also as a picture.
    print(render(found, limit, gpu))
    if plot is not None:
        draw_step(found, plot, limit)


def render(found: Plan, memory: int | None = None, gpu: GPU = "h100") -> str:
    """Return a plan as text; with the ``memory`` of a device in bytes, also whether it fits."""
    lines = [f"{type(found.job.module).__name__}, {found.tokens} tokens"]
    for part, nbytes in (found.parts | {"predicted peak of a rank": found.peak}).items():
        lines.append(f"  {part:24} {gib(nbytes):>12} {nbytes / found.peak:5.0%}")
    lines.append(f"Settings: {found.job.settings()}.")
    forward = found.forward.total() / 1e12
    lines.append(f"FLOPs: {found.flops / 1e12:.3g} TFLOP per step, {forward:.3g} TFLOP in the forward pass.")
    moved = found.offloaded
    if moved.cpu_bytes or moved.disk_bytes:
        lines.append(f"Offloaded: {gib(moved.cpu_bytes)} to CPU memory and {gib(moved.disk_bytes)} to disk per step.")
    speed = predict(found, MACHINES[gpu])
    lines.append(
        f"Speed on {gpu}: {speed.tokens_per_second:,.0f} tokens per second on {found.job.engine.ranks} of them,"
        f" {speed.seconds:.3g} s per step, bound by {speed.bound}."
    )
    if memory is not None and found.peak <= memory:
        lines.append(f"It fits into {gib(memory)}, with {gib(memory - found.peak)} to spare.")
    elif memory is not None:
        lines.append(f"It takes {gib(found.peak - memory)} more than {gib(memory)}.")
    return "\n".join(lines)


def draw_step(found: Plan, path: str, memory: int | None = None) -> None:
    """Plot memory over a step, stacked by part, in a format of matplotlib such as ``.png``, ``.svg`` or ``.pdf``.

    ``memory`` is that of a device in bytes, drawn as a line.
    """
    from matplotlib.figure import Figure

    # 1. The bytes of each part, at equal distances and at the peak.
    start = found.phases["forward"]
    end = len(found.events)
    moments = sorted({*range(start, end, 1 + (end - start) // POINTS), found.peak_at})
    rows = torch.tensor([*found.over_time.values()])[:, moments] / 2**30
    figure = Figure(figsize=(6, 4), layout="constrained", dpi=150)
    axis = figure.subplots()
    axis.stackplot(moments, rows.numpy(), labels=list(found.over_time))
    # 2. Lines where each phase begins, and at the memory of the device.
    for phase, moment in found.phases.items():
        axis.axvline(moment, color="black", linewidth=0.5, linestyle=":")
        axis.text(moment, found.peak / 2**30, f" {phase}", fontsize=7)
    if memory:
        axis.axhline(memory / 2**30, color="black", linewidth=1, linestyle="--")
    axis.set(title=f"peak {gib(found.peak)}", xticks=[], xlabel="allocations, in their order", ylabel="GiB")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path)
