"""Tiling and activation checkpointing with offloading, for use with any strategy, for Trainer and for Fabric."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lt_tiled._prepare import AppliesPolicies, Prepared
from lt_tiled.cli.numbers import PositiveInt
from lt_tiled.policies import ActivationCheckpointing, Tiers, Tiling
from lt_tiled.strategies.base import OffloadLog
from lt_tiled.strategies.blocks import adapt_to_fsdp_units
from lt_tiled.strategies.deepspeed import adapt_tiles


class PreparingCallback(AppliesPolicies, Callback):
    """Prepares the model after the engine has wrapped it.

    With a Trainer, the model is restored after ``fit`` (``validate``, ...), also after an exception. With Fabric, the
    model must go through ``fabric.setup``, and :meth:`release` restores it.
    """

    def __init__(
        self, tiling: Any = None, activation_checkpointing: Any = None, loss: bool | int | None = None
    ) -> None:
        self.set_policies(tiling, activation_checkpointing, loss)

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
            adapt_to_fsdp_units(model)
        except BaseException:
            self._models.release(keep=before)
            raise


class TiledMLP(PreparingCallback):
    """Tiles modules under any strategy, for ``Trainer(callbacks=...)`` and ``Fabric(callbacks=...)``.

    Args:
        num_shards: Tiles per call, or ``"auto"``.
        loss: Whether transformers models compute their loss in tiles: ``True``, or how many tiles.
        tiling: The other fields of :class:`~lt_tiled.policies.Tiling`. ``targets=[]`` tiles only the loss.
    """

    def __init__(
        self,
        num_shards: PositiveInt | Literal["auto"] = "auto",
        loss: bool | PositiveInt | None = None,
        **tiling: Any,
    ) -> None:
        only_loss = loss and tiling.get("targets") == []
        super().__init__(tiling=None if only_loss else Tiling(num_shards, **tiling), loss=loss)


class OffloadedCheckpointing(PreparingCallback):
    """Applies activation checkpointing under any strategy and offloads the block inputs, for Trainer and for Fabric.

    With a Trainer, the figures of each step go to the loggers of the run as ``lt_tiled/offload_...``.

    Args:
        offload: Where the block inputs go; ``None`` keeps them on the device.
        activation_checkpointing: The other fields of :class:`~lt_tiled.policies.ActivationCheckpointing`.
    """

    def __init__(self, offload: Tiers | None = "cpu", **activation_checkpointing: Any) -> None:
        super().__init__(activation_checkpointing=ActivationCheckpointing(offload=offload, **activation_checkpointing))
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
