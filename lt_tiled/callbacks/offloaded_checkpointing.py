"""Activation checkpointing with offloading, for use with any strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule

from lt_tiled.callbacks._preparing import PreparingCallback
from lt_tiled.policies import Checkpointing, Tiers
from lt_tiled.strategies.base import OffloadLog


class OffloadedCheckpointing(PreparingCallback):
    """Applies activation checkpointing under any strategy and offloads the block inputs, for Trainer and for Fabric.

    With a Trainer, the figures of each step go to the loggers of the run as ``offload/...``.

    Args:
        offload: Where the block inputs go; ``None`` keeps them on the device.
        checkpointing: The other fields of :class:`~lt_tiled.policies.Checkpointing`.
    """

    def __init__(self, offload: Tiers | None = "cpu", **checkpointing: Any) -> None:
        super().__init__(checkpointing=Checkpointing(offload=offload, **checkpointing))
        self._log = OffloadLog()

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._log = OffloadLog()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.prepared is not None and self.prepared.offloader is not None:
            self._log.step(trainer, self.prepared.offloader)

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._models.free_buffers()  # the last checkpoint of the run may need the memory
