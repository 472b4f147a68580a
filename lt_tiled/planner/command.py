"""``lt-tiled plan``: predict, print, plot and write, from the configuration of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry

from lt_tiled._log import progress
from lt_tiled._prepare import AppliesPolicies
from lt_tiled.planner.job import make_job
from lt_tiled.planner.picture import check_format, draw_step
from lt_tiled.planner.search import GPU, Plan, cheapest, longest, plan
from lt_tiled.planner.speed import parse_machine
from lt_tiled.policies import check_count, parse_bytes


def run_plan(
    config: Mapping[str, Any],
    trainer: Mapping[str, Any],
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    seq: int | None = None,
    memory: int | str | None = None,
    devices: int | None = None,
    find: Literal["max-seq", "settings"] | None = None,
    output: str | None = None,
    plot: str | None = None,
    gpu: str = GPU,
) -> None:
    """Predict the memory of a training step from its configuration, without weights, a GPU or a network.

    Args:
        config: The configuration as in YAML.
        trainer: The arguments of the Trainer.
        model: The module, on the meta device.
        datamodule: Its data, of which one batch is read.
        seq: The sequence length; by default that of the data.
        memory: The memory of each device: bytes, or text such as ``"80GiB"``.
        devices: The number of ranks; by default that of the Trainer.
        find: ``max-seq`` finds the longest sequence that fits, ``settings`` the fastest settings with which the
            sequence length fits.
        output: With ``find``, a file for the result, for ``lt-tiled fit --config yours.yaml --config output.yaml``.
        plot: A plot (``.png``, ``.svg``, ``.pdf``) of memory over the step.
        gpu: The GPU of the predicted speed, by which ``settings`` ranks: ``a100``, ``h100``, ``h200`` or ``b200``, with
            other numbers behind it, as in ``h100,pcie=25,nvme=3,network=50`` (GB/s in one direction).

    Raises:
        ValueError: If an argument is not understood, or nothing fits.
    """
    check_count("seq", seq, None)
    check_count("devices", devices, None)
    limit = None if memory is None else parse_bytes(memory, "memory")
    if find is not None and limit is None:
        raise ValueError(f"find={find!r} needs the memory of a device: pass --memory, such as --memory 80GiB.")
    if find is not None and any(isinstance(c, AppliesPolicies) for c in trainer.get("callbacks") or []):
        raise ValueError(f"find={find!r} writes strategy settings, and callbacks have some: pass them to the strategy.")
    machine = parse_machine(gpu)
    if plot is not None:
        check_format(plot)
    job = make_job(model, datamodule, trainer, devices)
    with progress("Planning") as tell:
        if find is None or limit is None:
            found = plan(job, seq)
        elif find == "max-seq":
            found = longest(job, limit, tokens=seq, tell=tell)
        else:
            found = cheapest(job, limit, seq or job.tokens, tell, machine)
    print(found.render(limit, gpu))
    if find is not None:
        text = yaml.safe_dump(settings_yaml(config, found, trainer.get("strategy")), sort_keys=False)
        print(text)
        if output is not None:
            Path(output).write_text(text)
            print(f"Written to {output}: add it to fit's arguments as a second --config.")
    if plot is not None:
        draw_step(found.simulation, plot, limit)


def settings_yaml(config: Mapping[str, Any], found: Plan, strategy: Any) -> dict[str, Any]:
    """Return a second ``--config`` that sets what a plan found: all fields, so that none of the first remain.

    The strategy is that of the first configuration, as an object or a name.
    """
    known = isinstance(strategy, str) and strategy in StrategyRegistry.available_strategies()
    init: dict[str, Any] = {**StrategyRegistry[strategy]["init_params"]} if known else {}
    engine = found.settings.engine
    if engine.stage:
        init["stage"] = engine.stage
    tiling, checkpointing = found.settings.tiling, found.settings.activation_checkpointing
    sequence_parallel = found.settings.sequence_parallel
    init["tiling"] = None if tiling is None else asdict(tiling)
    loss = found.settings.loss
    init["loss"] = loss is not None if loss is None or loss == "auto" else loss
    init["activation_checkpointing"] = False if checkpointing is None else asdict(checkpointing)
    init["sequence_parallel"] = None if sequence_parallel is None else asdict(sequence_parallel)
    chosen = {"class_path": f"lt_tiled.{engine.strategy}", "init_args": init}
    result: dict[str, Any] = {"trainer": {"strategy": chosen}}
    data = config.get("data") or {}
    if "seq_len" in data.get("init_args", {}):
        result["data"] = {"class_path": data["class_path"], "init_args": {"seq_len": found.tokens}}
    return result
