"""Fully sharded data parallel (FSDP1), for Fabric."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import FSDPStrategy
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lt_tiled.fabric._mixin import TiledStrategy
from lt_tiled.strategies._fsdp import FSDPNeeds, full_state_dict, units_of


class TiledFSDPStrategy(FSDPNeeds, TiledStrategy, FSDPStrategy):
    """Tiling and checkpointing under ``FullyShardedDataParallel``, with all of :class:`FSDPStrategy`'s arguments.

    Without ``auto_wrap_policy`` each block is a unit.

    Raises:
        ValueError: If ``activation_checkpointing_policy`` and ``checkpointing`` are both given; at setup, if a tiled
            module holds units.
    """

    options_name = "_fsdp_kwargs"

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return enable_wrap(wrapper_cls=FullyShardedDataParallel, **self.wrapper_arguments())

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, nn.Module | Optimizer | Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        path = Path(self.broadcast(path))
        models = [value for value in state.values() if isinstance(value, nn.Module) and units_of(value)]
        shards = path.is_dir() and (path / "meta.pt").is_file()  # as Lightning tells a sharded checkpoint
        if (
            not self.saves_full_on_cpu
            or len(models) != 1
            or storage_options is not None
            or (path.is_dir() and not shards)
        ):
            super().save_checkpoint(path, state, storage_options, filter)
            return
        # As the parent does it, but for where the weights come from.
        self.prepared.free_buffers()
        full: dict[str, Any] = {}
        for key, value in state.items():
            if value is models[0]:
                value = full_state_dict(value)
            elif isinstance(value, Optimizer):
                value = FullyShardedDataParallel.optim_state_dict(models[0], value)
            elif isinstance(value, Stateful):
                value = value.state_dict()
            if filter and key in filter:
                value = {k: v for k, v in value.items() if filter[key](k, v)}
            full[key] = value
        if self.global_rank == 0:
            if shards:
                shutil.rmtree(path)
            torch.save(full, path)
