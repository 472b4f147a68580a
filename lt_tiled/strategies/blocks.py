"""The blocks that FSDP shards as units by default."""

from __future__ import annotations

from torch import nn

from lt_tiled._log import warn
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.policies import ActivationCheckpointing
from lt_tiled.recompute.blocks import find_checkpointable


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
