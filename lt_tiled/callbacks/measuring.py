"""The table at the end of a run, and the memory, offload traffic and speed of each step."""

from __future__ import annotations

import time
from math import prod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule

from lt_tiled.memory import PeakMemory
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.report import Report, show
from lt_tiled.training_step.step import shape_of


class _StepMeter(Callback):
    """Measures the peak memory of each training step."""

    peak = 0
    """The highest peak of a step so far, in bytes."""
    _peak_of_step = 0
    _steps = 0

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
        self._peak_of_step = self._memory.read()
        self.peak = max(self.peak, self._peak_of_step)


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
    """Logs peak memory, tiles, tokens per second and offloaded bytes of each batch as ``lt_tiled/...``."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._offloaded = OffloadStats().metrics()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._start = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # 1. The clock and the memory first: the report below takes time, too.
        seconds = max(time.monotonic() - self._start, 1e-9)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # 2. The figures of this step. Those of the offloader are sums over all steps so far.
        report = Report.of(pl_module)
        metrics = {
            "lt_tiled/peak_memory": self._peak_of_step / 2**30,
            "lt_tiled/tiles": float(max([1, *(row.tiles for row in report.tiled + report.losses)])),
            "lt_tiled/tokens_per_second": prod(shape_of(batch)) / seconds,
        }
        if report.offloaded is not None:
            before = self._offloaded
            self._offloaded = report.offloaded.metrics()
            for name, value in self._offloaded.items():
                metrics[name] = value - before[name]
        pl_module.log_dict(metrics, batch_size=1)
