"""The table at the end of a run."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule
from rich.console import Console

from lt_tiled.memory import PeakMemory
from lt_tiled.report import Report


class TilingReport(Callback):
    """Prints what was tiled, into how many tiles, what was offloaded, and the peak memory of a training step."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.peak = 0
        """The highest peak of a step, in bytes."""
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.peak = self._steps = 0
        self._start = time.monotonic()
        self._memory = PeakMemory(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._memory.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps += 1
        self.peak = max(self.peak, self._memory.read())

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        # The strategy restores the model in its teardown, which comes before `on_fit_end`.
        self.report = Report.of(pl_module)
        self._seconds = time.monotonic() - self._start

    def on_fit_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        if self.report is not None and trainer.is_global_zero:
            table, console = self.report.table(self._memory.describe(self.peak), self._steps, self._seconds), Console()
            if not console.is_terminal:  # a file needs no line breaks
                console.width = 1000
            console.print(table)
