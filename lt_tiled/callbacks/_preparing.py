"""When a callback prepares the model, for Trainer and for Fabric, and undoes it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled.strategies._deepspeed import adapt_tiles
from lt_tiled.strategies._units import refuse_units_in_tiled_modules


class PreparingCallback(AppliesPolicies, Callback):
    """Marks the modules once the engine has wrapped the model.

    They are as they were after ``fit`` (``validate``, ...), also when it ends in an exception. With Fabric the model
    has to go through ``fabric.setup``, and :meth:`release` undoes it.
    """

    def __init__(self, tiling: Any = None, checkpointing: Any = None, loss: bool | int | None = None) -> None:
        self.set_policies(tiling, checkpointing, loss)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.strategy, trainer.num_devices)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.strategy, trainer.num_devices)

    def on_test_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.strategy, trainer.num_devices)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.strategy, trainer.num_devices)

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.release()

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self._prepare(
            module, fabric.strategy, len(getattr(fabric.strategy, "parallel_devices", None) or [fabric.device])
        )

    def _prepare(self, model: nn.Module, strategy: Any, ranks_per_node: int) -> None:
        before = len(self.prepared)
        self.prepared.add(model, self, ranks_per_node)
        try:
            if isinstance(strategy, DeepSpeedStrategy | FabricDeepSpeedStrategy):
                adapt_tiles(strategy, model)
            refuse_units_in_tiled_modules(model)
        except BaseException:
            self.prepared.release(keep=before)
            raise
