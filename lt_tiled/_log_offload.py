"""Offloading's figures in the run's logger."""

from __future__ import annotations

import lightning.pytorch as pl

from lt_tiled.offload.offloader import Offloader


class OffloadLog:
    """Logs the figures of each optimizer step, those of all its micro-batches together, when and where Lightning logs a
    step.
    """

    def __init__(self) -> None:
        self._steps = 0

    def step(self, trainer: pl.Trainer, offloader: Offloader) -> None:
        """Call between batches; does something once the optimizer has stepped."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        stats = offloader.end_step()
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and self._steps % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(stats.metrics(), step=self._steps - 1)  # Lightning counts from zero
