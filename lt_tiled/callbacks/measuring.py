"""The table at the end of a run, and the memory, offload traffic and speed of each step."""

from __future__ import annotations

import time
from math import prod
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lt_tiled.memory import PeakMemory
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.report import Report, show
from lt_tiled.training_step.step import shape_of


class _StepMeter(Callback):
    """Measures the peak memory of each training step of a Trainer."""

    def __init__(self) -> None:
        self.peak = 0
        """The highest peak of a step so far, in bytes."""
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.peak = 0
        self._steps = 0
        self._memory = PeakMemory(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._memory.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps += 1
        self.peak = max(self.peak, self._memory.read())


class TilingReport(_StepMeter):
    """Prints what was tiled, into how many tiles, what was offloaded, and the peak memory of a training step."""

    report: Report | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        # The strategy restores the model in its teardown, which comes before `on_fit_end`.
        self.report = Report.of(pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        if self.report is not None and trainer.is_global_zero:
            show(self.report.table(self._memory.describe(self.peak), self._steps))


class MemoryMonitor(_StepMeter):
    """Logs peak memory, tiles, tokens per second and offloaded bytes of each step, for Trainer and Fabric.

    The figures go to the loggers of the run as ``lt_tiled/...``. With a Trainer a step is a batch. With Fabric it ends
    with ``optimizer.step()``, and the tokens are those passed to the model.
    """

    # Trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._offloaded = OffloadStats().metrics()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin_step(prod(shape_of(batch)))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log_dict(self._end_step(pl_module), batch_size=1)

    # Fabric

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self._fabric = fabric
        self._model = module
        self._memory = PeakMemory(fabric.device)
        self._offloaded = OffloadStats().metrics()
        self._begin_step()

        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._tokens += prod(shape_of((args, kwargs)))

        module.register_forward_pre_hook(count, with_kwargs=True)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Fabric's hook, called by ``optimizer.step()``."""
        self._fabric.log_dict(self._end_step(self._model), step=self._steps - 1)
        self._begin_step()

    # Both

    def _begin_step(self, tokens: int = 0) -> None:
        self._memory.reset()
        self._start = time.monotonic()
        self._tokens = tokens

    def _end_step(self, model: nn.Module) -> dict[str, float]:
        """Return the figures of the step by name."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        peak = self._memory.read()
        self.peak = max(self.peak, peak)
        self._steps += 1
        report = Report.of(model)
        metrics = {
            "lt_tiled/peak_memory": peak / 2**30,
            "lt_tiled/tiles": float(max([1, *(row.tiles for row in report.tiled + report.losses)])),
            "lt_tiled/tokens_per_second": self._tokens / seconds,
        }
        if report.offloaded is not None:
            before = self._offloaded
            self._offloaded = report.offloaded.metrics()
            for name, value in self._offloaded.items():
                metrics[name] = value - before[name]
        return metrics
