"""Checkpointing and offloading for who keeps their own strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule

from lt_tiled.callbacks._preparing import PreparingCallback
from lt_tiled.policies import Checkpointing, Tiers
from lt_tiled.strategies.base import OffloadLog


class OffloadedCheckpointing(PreparingCallback):
    """Checkpoints the model's blocks under any strategy and sends their inputs away, for Trainer and for Fabric.

    Under a Trainer each step's figures go to the run's logger as ``offload/...``.

    Args:
        offload: Where the inputs go; ``None`` leaves them where they are.
        checkpointing: The other fields of :class:`~lt_tiled.policies.Checkpointing`.
    """

    def __init__(self, offload: Tiers | None = "cpu", **checkpointing: Any) -> None:
        super().__init__(checkpointing=Checkpointing(offload=offload, **checkpointing))
        self._log = OffloadLog()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.prepared is not None and self.prepared.offloader is not None:
            self._log.step(trainer, self.prepared.offloader)

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepared.free_buffers()  # a last checkpoint may need the RAM

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._log = OffloadLog()
        super().on_fit_start(trainer, pl_module)
