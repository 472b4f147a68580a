"""Fully sharded data parallel (FSDP1), for Fabric."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lt_tiled.fabric._mixin import TiledStrategy
from lt_tiled.strategies._fsdp import FSDPNeeds, full_state_dict
from lt_tiled.strategies._units import refuse_units_in_tiled_modules


class TiledFSDPStrategy(FSDPNeeds, TiledStrategy, FSDPStrategy):
    """Tiling and checkpointing under ``FullyShardedDataParallel``, with all of :class:`FSDPStrategy`'s arguments.

    Without ``auto_wrap_policy`` each block is a unit.

    Raises:
        ValueError: If ``activation_checkpointing_policy`` and ``checkpointing`` are both given; at setup, if a tiled module holds units.
    """

    @property
    @override
    def fsdp_options(self) -> dict[str, Any]:
        return self._fsdp_kwargs

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        wrapped: nn.Module = super().setup_module(module)
        refuse_units_in_tiled_modules(wrapped)
        return wrapped

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
        roots = [value for value in state.values() if isinstance(value, FullyShardedDataParallel)]
        if not self.saves_full_on_cpu or len(roots) != 1 or storage_options is not None or Path(path).is_dir():
            super().save_checkpoint(path, state, storage_options, filter)
            return
        # As the parent does it, but for where the weights come from.
        self.prepared.free_buffers()
        full: dict[str, Any] = {}
        for key, value in state.items():
            if value is roots[0]:
                value = full_state_dict(value)
            elif isinstance(value, Optimizer):
                value = FullyShardedDataParallel.optim_state_dict(roots[0], value)
            elif hasattr(value, "state_dict"):
                value = value.state_dict()
            keep = (filter or {}).get(key, _everything)
            full[key] = {k: v for k, v in value.items() if keep(k, v)} if isinstance(value, dict) else value
        path = self.broadcast(path)
        if self.global_rank == 0:
            torch.save(full, path)


def _everything(key: str, value: Any) -> bool:
    return True
