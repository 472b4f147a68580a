"""Blocks as FSDP units: which modules FSDP1 and FSDP2 shard by default, and which they must not."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lt_tiled._log import warn
from lt_tiled.checkpointing import find_checkpointable
from lt_tiled.modules.find import find_blocks, unwrapped, walk
from lt_tiled.modules.patch import get_mark
from lt_tiled.policies import Checkpointing
from lt_tiled.tiling.api import tile_marks
from lt_tiled.tiling.deferred import JoinMark


def blocks_to_shard(model: nn.Module, checkpointing: Checkpointing | None) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their paths, each of which becomes an FSDP unit by default."""
    blocks = find_blocks(model)
    if not blocks and checkpointing is not None and checkpointing.targets != "auto":
        blocks = find_checkpointable(model, checkpointing)
    if not blocks:
        warn(
            f"{type(model).__name__} has no recognizable blocks and becomes one FSDP unit, so all its weights are"
            " gathered at once: name its blocks in Checkpointing(targets=...), or shard it yourself (auto_wrap_policy,"
            " fully_shard)."
        )
    return blocks


def refuse_units_in_tiled_modules(model: nn.Module) -> None:
    """Raise if a tiled module contains FSDP units, whose weights would be gathered once per tile.

    A norm is not tiled with the MLP before it where either is an FSDP unit by itself.

    Raises:
        ValueError: Names the FSDP unit and the remedy.
    """
    units = {id(unwrapped(m)) for m in model.modules() if isinstance(m, FullyShardedDataParallel | FSDPModule)}
    if not units:
        return
    for path, module, is_inside in _tiled_with_what_follows(model, units):
        for name, part in module.named_modules():
            if id(unwrapped(part)) in units and (part is not module or is_inside):
                kind = type(module).__name__
                raise ValueError(
                    f"{path} ({kind}) is tiled, and {name or 'it'} inside it is an FSDP unit, whose weights would be"
                    f" gathered for every tile. Make the block or the whole {kind} the unit"
                    f" (auto_wrap_policy={{MyBlock}}, fully_shard(block)), leave the policy out for one unit per block,"
                    " or leave the module out of Tiling(targets=...)."
                )


def _tiled_with_what_follows(model: nn.Module, units: set[int]) -> list[tuple[str, nn.Module, bool]]:
    """Return the tiled modules, and whether each is tiled with another and so must not be an FSDP unit by itself."""
    marks = list(tile_marks(model))
    joined = [(path, m) for path, m in walk(model) if get_mark(m, JoinMark) is not None]
    apart = any(id(m) in units for m in [*(m for _, m, mark in marks if mark.chained), *(m for _, m in joined)])
    for _, _, mark in marks:
        mark.chained = mark.chained and not (apart and mark.alone)
    together = [] if all(mark.alone for _, _, mark in marks) else joined
    return [(path, m, mark.chained) for path, m, mark in marks] + [(path, m, True) for path, m in together]
