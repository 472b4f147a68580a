"""A training configuration that can be simulated: the LightningModule, one batch, and the settings of its Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lt_tiled._log import warn
from lt_tiled._prepare import AppliesPolicies
from lt_tiled.planner.engines import Engine, engine_of
from lt_tiled.policies import ActivationCheckpointing, LossShards, SequenceParallel, Tiling
from lt_tiled.sequence_parallel.groups import check_size
from lt_tiled.tiling.weights import swapped
from lt_tiled.training_step.step import first_batch, silence

_DTYPES = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True)
class Job:
    """What a run trains, and how: a module and a batch on the meta device, and what its strategy and Trainer set."""

    module: LightningModule
    batch: Any
    tiling: Tiling | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    loss: LossShards | None = None
    sequence_parallel: SequenceParallel | None = None
    engine: Engine = field(default_factory=Engine)
    dtype: torch.dtype = torch.float32  # of the weights
    autocast: torch.dtype | None = None  # of mixed precision
    accumulate: int = 1  # batches per optimizer step
    gpu: bool = False  # where the optimizer updates all weights at once

    def settings(self) -> str:
        """Return one line: the engine, and policies with the fields that are not their defaults."""
        text = self.engine.name
        if self.engine.ranks > 1:
            text += f" over {self.engine.ranks} ranks"
        for policy in filter(None, (self.tiling, self.activation_checkpointing, self.sequence_parallel)):
            kind = type(policy)
            changed = [f"{name}={value!r}" for name, value in vars(policy).items() if value != getattr(kind, name)]
            text += f", {kind.__name__}({', '.join(changed)})"
        if self.loss:
            text += ", tiled loss"
        return text


def make_job(
    module: LightningModule,
    datamodule: LightningDataModule | None,
    trainer: Mapping[str, Any],
    devices: int | None = None,
) -> Job:
    """Configure a module, made under ``torch.device("meta")``, as a Trainer with these arguments would.

    ``devices`` is the number of ranks, by default that of the Trainer.

    Raises:
        ValueError: If an argument is not understood.
    """
    settings = _settings(trainer, devices or _ranks(trainer))
    # 1. A module may ask a Trainer, which runs nothing, and would log which devices it uses.
    with swapped([(vars(logging.getLogger("lightning.pytorch.utilities.rank_zero")), "disabled", True)]):
        stub = Trainer(accelerator="cpu", devices=1, max_epochs=-1, max_steps=1000, barebones=True)
    stub.datamodule = datamodule  # type: ignore[attr-defined]
    module.trainer = stub
    stub.strategy.connect(module)
    # 2. The hooks before a fit, on the meta device.
    if datamodule is None:
        module.prepare_data()
    else:
        datamodule.prepare_data()
        datamodule.setup("fit")
    with torch.device("meta"):
        module.setup("fit")
        module.configure_model()
    module.to(settings["dtype"])
    silence(module)
    # 3. A batch.
    batch = first_batch(module, datamodule)
    batch = apply_to_collection(batch, Tensor, lambda t: torch.empty_like(t, device="meta"))
    return Job(module, batch, **settings)


def _settings(trainer: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the fields of a job that the arguments of a Trainer, its strategy and its callbacks set."""
    # 1. The policies are those of the strategy, or else of callbacks.
    strategy = trainer.get("strategy", "auto")
    if isinstance(strategy, str) and strategy != "auto":
        strategy = StrategyRegistry.get(strategy)
    result = dict[str, Any]()
    for owner in tree_leaves([strategy, trainer.get("callbacks")]):
        if isinstance(owner, AppliesPolicies):
            for name in ("tiling", "activation_checkpointing", "loss", "sequence_parallel"):
                result[name] = result.get(name) or getattr(owner, name)
    if shared := result.get("sequence_parallel"):
        check_size(shared.size, ranks)
    # 2. The precision: FSDP casts the weights that it gathers, and DeepSpeed all, in the place of autocast.
    precision = str(trainer.get("precision") or "32")
    name, _, kind = precision.partition("-")
    if name not in _DTYPES:
        raise ValueError(f"precision={precision!r} cannot be planned: set it to one of {', '.join(_DTYPES)}.")
    dtype = _DTYPES[name]
    autocast = None
    if dtype.itemsize == 2 and kind != "true":
        autocast = dtype
        dtype = torch.float32
    engine = engine_of(strategy, ranks, autocast)
    if engine.name == "fsdp":
        autocast = None
    elif autocast is not None and engine.stage:
        dtype = autocast
        autocast = None
    result |= {"engine": engine, "dtype": dtype, "autocast": autocast}
    # 3. What else the Trainer sets.
    result["accumulate"] = int(trainer.get("accumulate_grad_batches") or 1)
    result["gpu"] = trainer.get("accelerator", "auto") not in ("cpu", "mps")
    return result


def _ranks(trainer: Mapping[str, Any]) -> int:
    """Return the number of ranks, as far as the arguments of a Trainer say it."""
    devices = trainer.get("devices", "auto")
    if isinstance(devices, list):
        devices = len(devices)
    elif not str(devices).isdecimal():
        warn(f"devices={devices!r} is planned as one device: say how many with --devices.")
        devices = 1
    return int(devices) * int(trainer.get("num_nodes", 1))
