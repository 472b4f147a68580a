"""Tiling and activation checkpointing under any strategy, for Trainer and for Fabric."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled.policies import ActivationCheckpointingLike, Tiling


class Tiled(AppliesPolicies, Callback):
    """Applies the policies under any other strategy, for Trainer and for Fabric.

    With a Trainer, the model is prepared at the end of ``configure_model``, before the engine wraps it, and restored
    after ``fit`` (``validate``, ...), also after an exception. Fabric's ``setup`` prepares it after the engine has
    wrapped it, and :meth:`release` restores it.

    Args:
        tiling: As in the strategies.
        activation_checkpointing: As in the strategies.
        loss: As in the strategies.
    """

    def __init__(
        self,
        tiling: bool | int | Tiling | None = True,
        activation_checkpointing: ActivationCheckpointingLike | None = True,
        loss: bool | int | Literal["always"] | None = None,
    ) -> None:
        self.set_policies(tiling, activation_checkpointing, loss)

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the model, once it has its weights."""
        self.ranks_per_node = trainer.num_devices
        build = pl_module.configure_model

        # Not by functools.wraps, with which Lightning would see whether the module had the hook before.
        def configure_model() -> None:
            build()
            self.prepare_once(pl_module)

        pl_module.configure_model = configure_model  # type: ignore[method-assign]

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("configure_model", None)
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self.ranks_per_node = len(getattr(fabric.strategy, "parallel_devices", None) or [None])
        self.prepare_once(module)
