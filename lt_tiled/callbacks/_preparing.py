"""When a callback prepares the model, for Trainer and for Fabric, and undoes it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lt_tiled._prepare import Prepared, PreparedModels
from lt_tiled.policies import Checkpointing, Tiling
from lt_tiled.strategies.blocks import refuse_units_in_tiled_modules
from lt_tiled.strategies.deepspeed import adapt_tiles


class PreparingCallback(Callback):
    """Marks the modules once the engine has wrapped the model.

    They are as they were after ``fit`` (``validate``, ...), also when it ends in an exception. With Fabric the model
    has to go through ``fabric.setup``, and :meth:`release` undoes it.
    """

    def __init__(self, tiling: Tiling | None = None, checkpointing: Checkpointing | None = None) -> None:
        self.tiling = tiling
        self.checkpointing = checkpointing
        self._prepared = PreparedModels()

    @property
    def prepared(self) -> Prepared | None:
        """The model that was prepared last, until it is released."""
        return self._prepared[-1] if self._prepared else None

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

    def release(self) -> None:
        """Leave every model as it was."""
        self._prepared.release()

    def _prepare(self, model: nn.Module, strategy: Any, ranks_per_node: int) -> None:
        before = len(self._prepared)
        self._prepared.add(model, self.tiling, self.checkpointing, ranks_per_node)
        try:
            if isinstance(strategy, DeepSpeedStrategy | FabricDeepSpeedStrategy):
                adapt_tiles(strategy, model)
            refuse_units_in_tiled_modules(model)
        except BaseException:
            self._prepared.release(keep=before)
            raise
