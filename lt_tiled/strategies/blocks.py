"""Blocks that an engine treats as a whole: FSDP units by default, and what they must not share or contain."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lt_tiled._log import warn
from lt_tiled.checkpointing import find_checkpointable
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.find import unwrapped
from lt_tiled.modules.patch import get_patch
from lt_tiled.policies import ActivationCheckpointing
from lt_tiled.tiling.patched import NeighborPatch, TiledPatch, tiled_patches


def blocks_to_shard(
    model: nn.Module, activation_checkpointing: ActivationCheckpointing | None
) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their paths, each of which becomes an FSDP unit by default."""
    blocks = find_blocks(model)
    if not blocks and activation_checkpointing is not None and activation_checkpointing.targets != "auto":
        blocks = find_checkpointable(model, activation_checkpointing)
    if not blocks:
        warn(
            f"{type(model).__name__} has no recognizable blocks and becomes one FSDP unit, so all its weights are"
            " all-gathered at once: name its blocks in ActivationCheckpointing(targets=...), or shard it yourself"
            " (auto_wrap_policy, fully_shard)."
        )
    return blocks


def shared_weights(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the weights that belong to two blocks, or to a block and the rest of the model, after their names."""
    inside = {part for _, block in blocks for part in block.modules()}
    rest = (weight for m in model.modules() if m not in inside for weight in m.parameters(recurse=False))
    owner: dict[nn.Parameter, str] = {}
    for path, weights in [*((p, b.parameters()) for p, b in blocks), (f"the rest of {type(model).__name__}", rest)]:
        for weight in weights:
            if owner.setdefault(weight, path) != path:
                yield owner[weight], path, weight


def adapt_to_fsdp_units(model: nn.Module) -> None:
    """Set what tiled modules need under FSDP.

    If a norm or MLP is its own FSDP unit, its weights are gathered only during its call, so nothing is deferred.

    Raises:
        ValueError: If a tiled module contains an FSDP unit, whose weights would be all-gathered once per tile.
    """
    fsdp_units = {unwrapped(m) for m in model.modules() if isinstance(m, FullyShardedDataParallel | FSDPModule)}
    apart = any(get_patch(unit, NeighborPatch) or get_patch(unit, TiledPatch) for unit in fsdp_units)
    for path, module, patch in tiled_patches(model):
        patch.needs.defer = patch.needs.defer and not apart
        for name, part in module.named_modules():
            if unwrapped(part) in fsdp_units and part is not module:
                kind = type(module).__name__
                raise ValueError(
                    f"{path} ({kind}) is tiled, and {name} inside it is an FSDP unit, whose weights would be"
                    f" all-gathered for every tile. Make the block or the whole {kind} the FSDP unit"
                    " (auto_wrap_policy={MyBlock}, fully_shard(block)), leave the policy out for one FSDP unit per"
                    " block, or remove the module from Tiling(targets=...)."
                )
