"""When a callback prepares the model, for Trainer and for Fabric, and undoes it."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lt_tiled.policies import Checkpointing, Tiling
from lt_tiled.prepare import Prepared


class PreparingCallback(Callback):
    """Marks the modules once the engine has wrapped the model.

    They are as they were after ``fit`` (``validate``, ...), also when it ends in an exception. With Fabric the model has to go
    through ``fabric.setup``, and :meth:`release` undoes it.
    """

    tiling: Tiling | None = None
    checkpointing: Checkpointing | None = None
    prepared: Prepared | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.num_devices)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.num_devices)

    def on_test_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.num_devices)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.num_devices)

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.release()

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self.release()
        self._prepare(module, len(getattr(fabric.strategy, "parallel_devices", None) or [fabric.device]))

    def release(self) -> None:
        """Leave the model as it was."""
        if self.prepared is not None:
            self.prepared.release()
            self.prepared = None

    def _prepare(self, model: nn.Module, ranks_per_node: int) -> None:
        if self.prepared is None:
            self.prepared = Prepared(model, self.tiling, self.checkpointing, ranks_per_node)
