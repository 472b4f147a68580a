"""Fully sharded data parallel (FSDP1), for Trainer."""

from __future__ import annotations

import weakref
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

_ROOTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FullyShardedDataParallel]] = weakref.WeakKeyDictionary()
"""What LightningModules are wrapped in, as long as a strategy has it."""


class TiledFSDPStrategy(FSDPNeeds, TiledStrategy, FSDPStrategy):
    """Tiling and checkpointing under ``FullyShardedDataParallel``, with all of :class:`FSDPStrategy`'s arguments.

    Without ``auto_wrap_policy`` each block is a unit. A model that was wrapped stays wrapped from ``fit`` to
    ``validate``, ``test`` or ``predict``, and gradients are clipped by their norm over all ranks.

    Raises:
        ValueError: If ``activation_checkpointing_policy`` and ``checkpointing`` are both given; at setup, if a tiled
            module holds units.
    """

    options_name = "kwargs"
    _root: FullyShardedDataParallel | None = None

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if isinstance(self.model, FullyShardedDataParallel):
            # The plugin raises because it does not know the root:
            # https://github.com/Lightning-AI/pytorch-lightning/issues/19235
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    @override
    def teardown(self) -> None:
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        super().teardown()

    def _clip_by_norm(self, optimizer: object, clip_val: float) -> None:
        assert isinstance(self.model, FullyShardedDataParallel)
        if len(self.optimizers) > 1:
            raise ValueError(
                f"FSDP clips by the norm of all gradients, and there are {len(self.optimizers)} optimizers: clip by value, or use one."
            )
        self.model.clip_grad_norm_(clip_val)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # The parent wraps a wrapped model again, or not at its root:
        # https://github.com/Lightning-AI/pytorch-lightning/issues/19015
        if model in _ROOTS:
            self._root = _ROOTS[model]()
            if self._root is None:
                raise ValueError(
                    f"This {type(model).__name__} was wrapped by FSDP for a trainer that is gone: keep that trainer, or build the model"
                    " anew and load a checkpoint."
                )
            return self._root
        wrapped = super()._setup_model(self.wrap(model))
        if isinstance(wrapped, FullyShardedDataParallel):
            self._root = wrapped  # the trainer lets go of it between its runs
            _ROOTS[model] = weakref.ref(wrapped)
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
        with FullyShardedDataParallel.state_dict_type(
            self.model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config
        ):
            inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            return FullyShardedDataParallel.optim_state_dict(self.model, inner)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.saves_full_on_cpu:
            return super().lightning_module_state_dict()
        self.prepared.free_buffers()
        assert self.model is not None
        return full_state_dict(self.model)
