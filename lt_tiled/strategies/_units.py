"""Sharded units: where they must not stand, and where they stand by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from lt_tiled._find import find_blocks
from lt_tiled._log import inform
from lt_tiled.tiling.modules import tiled_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def refuse_units_in_tiled_modules(model: nn.Module) -> None:
    """Raise if a tiled module holds units of its own: the engine would gather their weights once per tile.

    Raises:
        ValueError: With the unit's name and the remedy.
    """
    for path, module in tiled_modules(model):
        for name, part in module.named_modules():
            if part is not module and isinstance(part, FullyShardedDataParallel | FSDPModule):
                kind = type(module).__name__
                raise ValueError(
                    f"{path} ({kind}) is tiled, and {name} inside it is an FSDP unit, whose weights would be gathered anew for every tile."
                    f" Make the block or the whole {kind} the unit (auto_wrap_policy={{MyBlock}}, fully_shard(block)), leave the policy out"
                    " for one unit per block, or leave the module out of Tiling(targets=...)."
                )


def policy_of_blocks(model: nn.Module) -> Callable[..., bool]:
    """FSDP's ``auto_wrap_policy`` where none is given: each block of the model is a unit."""
    blocks = {id(block) for _, block in find_blocks(model)}

    def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or id(module) in blocks

    return is_block


def is_parallelized(model: nn.Module) -> bool:
    """Whether somebody applied ``fully_shard`` or ``parallelize_module`` to the model."""
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(isinstance(p, DTensor) for p in model.parameters())


def shard_blocks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply ``fully_shard`` to each block of the model, and to what is around them.

    Args:
        model: A module that is called through its ``forward``.
        mesh: The one-dimensional mesh to shard over.
    """
    blocks = find_blocks(model)
    for _, block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inform(f"lt_tiled shards {type(model).__name__}, each of its {len(blocks)} blocks by itself")
    return model
