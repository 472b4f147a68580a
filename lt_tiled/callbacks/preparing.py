"""Tiling and activation checkpointing with offloading, for use with any strategy, for Trainer and for Fabric."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled.policies import ActivationCheckpointing, Tiers, Tiling


class PreparingCallback(AppliesPolicies, Callback):
    """Prepares the model after the engine has wrapped it.

    With a Trainer, the model is restored after ``fit`` (``validate``, ...), also after an exception. With Fabric, the
    model must go through ``fabric.setup``, and :meth:`release` restores it.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module, trainer.num_devices)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.release()

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        devices = getattr(fabric.strategy, "parallel_devices", None) or [fabric.device]
        self._prepare(module, len(devices))

    def _prepare(self, model: nn.Module, ranks_per_node: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.prepare_once(model)


class TiledMLP(PreparingCallback):
    """Tiles modules under any strategy, for ``Trainer(callbacks=...)`` and ``Fabric(callbacks=...)``.

    Args:
        tiling: What runs tile by tile: ``True``, a number of tiles, or a ``Tiling``; ``False`` tiles only the loss.
        loss: Whether transformers models compute their loss in tiles in training, where ``output.logits`` is then
            ``None``: ``True``, or how many tiles; ``"always"`` for evaluation, too.
    """

    def __init__(self, tiling: bool | int | Tiling = True, loss: bool | int | Literal["always"] | None = None) -> None:
        self.set_policies(tiling, None, loss)


class OffloadedCheckpointing(PreparingCallback):
    """Applies activation checkpointing under any strategy and offloads the block inputs, for Trainer and for Fabric.

    Args:
        activation_checkpointing: Where block inputs are offloaded, or a policy; ``True`` keeps them on the device.
    """

    def __init__(self, activation_checkpointing: bool | Tiers | ActivationCheckpointing = "cpu") -> None:
        self.set_policies(None, activation_checkpointing, None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.free_buffers()  # the last checkpoint of the run may need the memory
