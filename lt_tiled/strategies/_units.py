"""Sharded units: where they must not stand, and where they stand by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from lt_tiled._log import inform, warn
from lt_tiled.checkpointing import find_checkpointable
from lt_tiled.modules.find import find_blocks, has_forward, unwrapped
from lt_tiled.modules.patch import get_mark
from lt_tiled.policies import Checkpointing
from lt_tiled.tiling.api import NormMark, tile_marks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def refuse_units_in_tiled_modules(model: nn.Module) -> None:
    """Raise if a tiled module holds units of its own: the engine would gather their weights once per tile.

    A norm is not tiled with the MLP before it where either is a unit by itself.

    Raises:
        ValueError: With the unit's name and the remedy.
    """
    units = {id(unwrapped(m)) for m in model.modules() if isinstance(m, FullyShardedDataParallel | FSDPModule)}
    marks = list(tile_marks(model))
    norms = {id(m) for m in model.modules() if get_mark(unwrapped(m), NormMark) is not None}
    for _, _, mark in marks:
        mark.needs.defer = mark.needs.defer and not norms & units
    for path, module, _ in marks:
        for name, part in module.named_modules():
            if id(unwrapped(part)) in units and part is not module:
                kind = type(module).__name__
                raise ValueError(
                    f"{path} ({kind}) is tiled, and {name or 'it'} inside it is an FSDP unit, whose weights would be gathered anew"
                    f" for every tile. Make the block or the whole {kind} the unit (auto_wrap_policy={{MyBlock}}, fully_shard(block)),"
                    " leave the policy out for one unit per block, or leave the module out of Tiling(targets=...)."
                )


def policy_of_blocks(model: nn.Module, checkpointing: Checkpointing | None) -> Callable[..., bool]:
    """FSDP's ``auto_wrap_policy`` where none is given: each block of the model is a unit."""
    blocks = {id(block) for _, block in _blocks(model, checkpointing)}

    def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or id(module) in blocks

    return is_block


def shard_blocks(
    model: nn.Module, roots: list[nn.Module], mesh: DeviceMesh, checkpointing: Checkpointing | None
) -> None:
    """Apply ``fully_shard`` to each block of the model, and to what is around them.

    Args:
        model: The whole model.
        roots: The modules in it that are called through their ``forward`` and hold all of its weights.
        mesh: The one-dimensional mesh to shard over.
        checkpointing: Says what a block is where that is not to be seen.

    Raises:
        ValueError: If a weight stands outside of the roots, or two units would share one. Nothing is sharded then.
    """
    blocks = _blocks(model, checkpointing)
    units = {id(m): (path, m) for path, m in [*blocks, *((path, m) for path, m in _named(model, roots))]}
    _refuse_weights_outside(model, roots)
    _refuse_shared_weights(list(units.values()))
    for _, unit in units.values():
        # Explicitly: a unit that is called by nobody else's forward would keep its weights until the backward.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True if any(unit is block for _, block in blocks) else None)
    inform(f"lt_tiled shards {type(model).__name__}, each of its {len(blocks)} blocks by itself")


def callable_children(model: nn.Module) -> list[nn.Module]:
    """The children that hold weights; of a container, which nobody calls, its children."""
    with_weights = [child for child in model.children() if any(True for _ in child.parameters())]
    return [unit for child in with_weights for unit in ([child] if has_forward(child) else callable_children(child))]


def _blocks(model: nn.Module, checkpointing: Checkpointing | None) -> list[tuple[str, nn.Module]]:
    blocks = find_blocks(model)
    if not blocks and checkpointing is not None and checkpointing.targets != "auto":
        blocks = find_checkpointable(model, checkpointing)
    if not blocks:
        warn(
            f"{type(model).__name__} has no blocks that can be recognised and is sharded as one unit, whose weights are gathered together:"
            " name its blocks in Checkpointing(targets=...), or shard it yourself (auto_wrap_policy, fully_shard)."
        )
    return blocks


def _named(model: nn.Module, modules: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    names = {id(m): name for name, m in model.named_modules()}
    return [(names[id(m)], m) for m in modules]


def _refuse_weights_outside(model: nn.Module, roots: list[nn.Module]) -> None:
    inside = {id(weight) for root in roots for weight in root.parameters()}
    outside = [name for name, weight in model.named_parameters() if id(weight) not in inside]
    if outside:
        raise ValueError(
            f"{type(model).__name__} holds {', '.join(outside)} itself, which no unit can: move what has weights into a module of its own,"
            " or call fully_shard in configure_model."
        )


def _refuse_shared_weights(units: list[tuple[str, nn.Module]]) -> None:
    """A unit's weights are those of its modules that no unit further in holds."""
    owner: dict[int, str] = {}
    for path, unit in units:
        inner = {
            id(part) for _, other in units if other is not unit and _holds(unit, other) for part in other.modules()
        }
        own = {id(p): p for m in unit.modules() if id(m) not in inner for p in m.parameters(recurse=False)}
        for weight in own.values():
            if owner.setdefault(id(weight), path) != path:
                raise ValueError(
                    f"{owner[id(weight)] or 'the model'} and {path or 'the model'} share a weight of shape {list(weight.shape)} and would"
                    " be sharded apart, each with its own copy: put them into one module, or call fully_shard on both together."
                )


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(part is inner for part in outer.modules())
