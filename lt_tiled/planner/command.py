"""``lt-tiled plan``: from the command line's configuration to what is printed, drawn and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from rich.console import Console

from lt_tiled._types import PositiveFloat, PositiveInt, make_plain
from lt_tiled.callbacks._preparing import PreparingCallback
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.picture import check_format, draw_lengths, draw_step
from lt_tiled.planner.plan import Plan, gib
from lt_tiled.planner.search import cheapest, ladder, longest, plan
from lt_tiled.policies import Checkpointing, Tiling, parse_bytes

_STRATEGIES = {
    "single": "lt_tiled.TiledSingleDeviceStrategy",
    "ddp": "lt_tiled.TiledDDPStrategy",
    "fsdp": "lt_tiled.TiledFSDPStrategy",
    "fsdp2": "lt_tiled.TiledModelParallelStrategy",
    "zero1": "lt_tiled.TiledDeepSpeedStrategy",
    "zero2": "lt_tiled.TiledDeepSpeedStrategy",
    "zero3": "lt_tiled.TiledDeepSpeedStrategy",
}


def run_plan(
    config: Mapping[str, Any],
    trainer: Mapping[str, Any],
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    seq: PositiveInt | None = None,
    memory: int | str | None = None,
    devices: PositiveInt | None = None,
    find: Literal["max-seq", "settings"] | None = None,
    output: str | None = None,
    plot: str | None = None,
    plot_lengths: str | None = None,
    tflops: PositiveFloat = 400.0,
) -> None:
    """Predict the memory of a training step from its configuration, without weights, a GPU or a network.

    Args:
        config: The configuration as YAML holds it.
        trainer: The Trainer's arguments, with their objects made.
        model: The module, on the meta device.
        datamodule: Its data, of which one batch is read.
        seq: Tokens of each sequence, if not those of the data.
        memory: Of each device: bytes, or a text such as ``"80GiB"``.
        devices: How many, if not those of the Trainer.
        find: ``max-seq`` for the longest sequence that fits the memory, ``settings`` for the cheapest settings that fit
            the length.
        output: With ``find``, a file to write what was found to, for ``lt-tiled fit --config yours.yaml --config
            output.yaml``.
        plot: A picture of the memory over the step, with and without lt_tiled: ``.png``, ``.svg`` or ``.pdf``.
        plot_lengths: A picture of the peak against the length, for the combinations of features.
        tflops: What a device sustains, in 10**12 operations a second, for the bandwidth that hides offloading.

    Raises:
        ValueError: If an argument is not understood, or nothing fits.
    """
    limit = None if memory is None else parse_bytes(memory, "memory")
    if find is not None and limit is None:
        raise ValueError(f"find={find!r} needs to know what has to fit: give --memory, such as --memory 80GiB.")
    if find == "max-seq" and seq is not None:
        raise ValueError(f"find='max-seq' looks for the length, and seq={seq} gives one: leave one of them out.")
    if find is not None and any(isinstance(c, PreparingCallback) for c in trainer.get("callbacks") or []):
        raise ValueError(
            "What is found is written as a strategy's settings, and callbacks have some too: give them to the strategy."
        )
    for picture in (plot, plot_lengths):
        if picture is not None:
            check_format(picture)
    job = make_job(model, datamodule, trainer, devices)
    console = Console()
    if find is None or limit is None:
        found = plan(job, seq)
    elif find == "max-seq":
        found = longest(job, limit)
    else:
        found = cheapest(job, limit, int(seq or job.tokens))  # a plain number, for YAML
    console.print(found.render(tflops))
    if limit is not None:
        left = limit - found.peak
        fits = f"It fits into {gib(limit)}, with {gib(left)} to spare."
        console.print(fits if left >= 0 else f"It takes {gib(-left)} more than {gib(limit)}.")
    if find is not None:
        text = yaml.safe_dump(settings_yaml(config, found, trainer.get("strategy")), sort_keys=False)
        console.print(text, highlight=False)
        if output is not None:
            Path(output).write_text(text)
            console.print(f"Written to {output}: add it to fit's as a second --config.")
    if plot is not None:
        draw_step({"without lt_tiled": _plain(job, found).simulation, "with lt_tiled": found.simulation}, plot, limit)
        console.print(f"Drawn: {plot}")
    if plot_lengths is not None:
        draw_lengths(_peaks(job, found.tokens), plot_lengths, limit)
        console.print(f"Drawn: {plot_lengths}")


def settings_yaml(config: Mapping[str, Any], found: Plan, strategy: Any) -> dict[str, Any]:
    """What a configuration needs to run as a plan says, for a second ``--config``: all fields, as those of the first
    would stay.

    Args:
        config: The first.
        found: The plan.
        strategy: The first's strategy, as an object or a name.
    """
    init: dict[str, Any] = {}  # the rest of the first configuration's stays
    if isinstance(strategy, str) and strategy in StrategyRegistry.available_strategies():
        init.update(StrategyRegistry[strategy]["init_params"])  # what its name stands for
    if found.settings.engine.name.startswith("zero"):
        init["stage"] = int(found.settings.engine.name[-1])
    made = (
        StrategyRegistry.get(strategy)
        if isinstance(strategy, str) and strategy in StrategyRegistry.available_strategies()
        else strategy
    )
    ours = isinstance(made, Strategy) and type(made).__module__.startswith("lt_tiled")
    path = f"lt_tiled.{type(made).__name__}" if ours else _STRATEGIES[found.settings.engine.name]
    checkpointing = found.settings.checkpointing
    init["tiling"] = None if found.settings.tiling is None else _fields(found.settings.tiling)
    init["checkpointing"] = False if checkpointing is None else _fields(checkpointing)
    result: dict[str, Any] = {"trainer": {"strategy": {"class_path": path, "init_args": init}}}
    data = config.get("data") or {}
    if "seq_len" in data.get("init_args", {}):
        result["data"] = {"class_path": data["class_path"], "init_args": {"seq_len": found.tokens}}
    return result


def _fields(policy: Tiling | Checkpointing) -> dict[str, Any]:
    """In types that YAML knows; those of numbers with bounds are the parser's own."""
    fields = asdict(policy)
    make_plain(fields)
    return fields


def _plain(job: Job, found: Plan) -> Plan:
    """The same without tiles and offloading, and with whole logits."""
    policy = (
        None if found.settings.checkpointing is None else Checkpointing(targets=found.settings.checkpointing.targets)
    )
    return plan(job, found.tokens, replace(found.settings, tiling=None, checkpointing=policy), whole_loss=True)


def _peaks(job: Job, tokens: int) -> dict[str, list[tuple[int, int]]]:
    lengths = [max(tokens * 2**power // 8, 256) for power in range(5)]
    rows = {
        "whole": [
            (n, plan(job, n, replace(job.settings, tiling=None, checkpointing=None), whole_loss=True).peak)
            for n in lengths
        ]
    }
    names = ("whole", "tiled loss", "+ checkpointing", "+ tiles", "+ inputs in RAM")
    steps = [s for s in ladder(job) if s.checkpointing is None or s.checkpointing.offload != "disk"]
    for name, settings in zip(names[-len(steps) + 1 :], steps[1:], strict=True):
        rows[name] = [(n, plan(job, n, settings).peak) for n in lengths]
    return rows
