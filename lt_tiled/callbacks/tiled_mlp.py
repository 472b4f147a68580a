"""Tiling for who keeps their own strategy."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lt_tiled._types import PositiveInt
from lt_tiled.policies import Tiling
from lt_tiled.prepare import Prepared, prepare


class TiledMLP(Callback):
    """Tiles the model's modules under any strategy, for ``Trainer(callbacks=...)`` and ``Fabric(callbacks=...)``.

    The modules are marked once the engine has wrapped the model, and are as they were after ``fit`` (``validate``, ...), also when
    it ends in an exception. With Fabric the model has to go through ``fabric.setup``, and :meth:`release` undoes it.

    Args:
        num_shards: Tiles per call, or ``"auto"``.
        tiling: The other fields of :class:`~lt_tiled.policies.Tiling`.
    """

    def __init__(self, num_shards: PositiveInt | Literal["auto"] = "auto", **tiling: Any) -> None:
        self.tiling = Tiling(num_shards, **tiling)
        self.prepared: Prepared | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self._prepare(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.release()

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self.release()
        self._prepare(module)

    def release(self) -> None:
        """Leave the model as it was."""
        if self.prepared is not None:
            self.prepared.release()
            self.prepared = None

    def _prepare(self, model: nn.Module) -> None:
        if self.prepared is None:
            self.prepared = prepare(model, tiling=self.tiling)
