"""Fully sharded data parallel (FSDP1), for Trainer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lt_tiled.strategies._device import on_cpu
from lt_tiled.strategies._fsdp import FSDPNeeds, full_state_dict
from lt_tiled.strategies._mixin import TiledStrategy
from lt_tiled.strategies._units import refuse_units_in_tiled_modules


class TiledFSDPStrategy(FSDPNeeds, TiledStrategy, FSDPStrategy):
    """Tiling and checkpointing under ``FullyShardedDataParallel``, with all of :class:`FSDPStrategy`'s arguments.

    Without ``auto_wrap_policy`` each block is a unit. A model that was wrapped stays wrapped between ``fit``, ``validate``, ``test``
    and ``predict`` of one strategy, and gradients are clipped by their norm over all ranks.

    Raises:
        ValueError: If ``activation_checkpointing_policy`` and ``checkpointing`` are both given; at setup, if a tiled module holds units.
    """

    _root: FullyShardedDataParallel | None = None

    @property
    @override
    def fsdp_options(self) -> dict[str, Any]:
        return self.kwargs

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        refuse_units_in_tiled_modules(self.lightning_module)
        if isinstance(self.model, FullyShardedDataParallel):
            # The plugin raises because it does not know the root: https://github.com/Lightning-AI/pytorch-lightning/issues/19235
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: object, clip_val: float) -> None:
        assert isinstance(self.model, FullyShardedDataParallel)
        self.model.clip_grad_norm_(clip_val)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # The parent wraps a wrapped model again, or not at its root: https://github.com/Lightning-AI/pytorch-lightning/issues/19015
        if self._root is not None and self._root.module is model:
            return self._root
        wrapped = super()._setup_model(self.wrap(model))
        self._root = wrapped if isinstance(wrapped, FullyShardedDataParallel) else None
        return wrapped

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self.wrapper_arguments()):
            yield

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._state_dict_type != "full" or self.kwargs["use_orig_params"]:
            return super().optimizer_state(optimizer)
        # The parent numbers the weights, which have no numbers in a flat parameter; it loads the names as well.
        assert self.model is not None
        config = FullOptimStateDictConfig(offload_to_cpu=not on_cpu(self), rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
            inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            return FullyShardedDataParallel.optim_state_dict(self.model, inner)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.saves_full_on_cpu:
            return super().lightning_module_state_dict()
        self.prepared.free_buffers()
        assert self.model is not None
        return full_state_dict(self.model)
