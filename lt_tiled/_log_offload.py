"""Offloading's figures in the run's logger."""

from __future__ import annotations

import lightning.pytorch as pl

from lt_tiled.offload.hooks import Offloader


def log_step(trainer: pl.Trainer, offloader: Offloader) -> None:
    """Close the figures of a step, and log them as often as the trainer logs."""
    stats = offloader.end_step()
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if every and trainer.global_step % every == 0:
        for logger in trainer.loggers:
            logger.log_metrics(stats.metrics(), step=trainer.global_step)
