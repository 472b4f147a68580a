"""When a callback prepares the model, for Trainer and for Fabric, and when it restores it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lt_tiled._prepare import AppliesPolicies, Prepared
from lt_tiled.strategies.blocks import refuse_units_in_tiled_modules
from lt_tiled.strategies.deepspeed import adapt_tiles


class PreparingCallback(AppliesPolicies, Callback):
    """Prepares the model after the engine has wrapped it.

    With a Trainer, the model is restored after ``fit`` (``validate``, ...), also after an exception. With Fabric, the
    model must go through ``fabric.setup``, and :meth:`release` restores it.
    """

    def __init__(self, tiling: Any = None, checkpointing: Any = None, loss: bool | int | None = None) -> None:
        self.set_policies(tiling, checkpointing, loss)

    @property
    def prepared(self) -> Prepared | None:
        """The model that was prepared last, until it is released."""
        return self._models[-1] if self._models else None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.strategy, trainer.num_devices)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.release()

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        devices = getattr(fabric.strategy, "parallel_devices", None) or [fabric.device]
        self._prepare(module, fabric.strategy, len(devices))

    def _prepare(self, model: nn.Module, strategy: Any, ranks_per_node: int) -> None:
        before = len(self._models)
        self._models.add(model, self, ranks_per_node)
        try:
            if isinstance(strategy, DeepSpeedStrategy | FabricDeepSpeedStrategy):
                adapt_tiles(strategy, model)
            refuse_units_in_tiled_modules(model)
        except BaseException:
            self._models.release(keep=before)
            raise
