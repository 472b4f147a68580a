"""Which blocks are checkpointed: find, mark, unmark."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lt_tiled._find import NothingFound, find_blocks, find_named, walk
from lt_tiled._log import inform_once, warn
from lt_tiled._marks import Mark, remove_mark, set_mark
from lt_tiled.checkpointing.boundary import BlockOffload, run_checkpointed
from lt_tiled.policies import Checkpointing


class BlockMark(Mark):
    """What a checkpointed block carries."""

    attribute = "_lt_tiled_checkpointing"

    def __init__(self, offload: BlockOffload | None = None) -> None:
        self.offload = offload


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs in place of a checkpointed block's forward. Its name is what pickle looks up on the class."""
    mark = self.__dict__[BlockMark.attribute]
    if not mark.active or not torch.is_grad_enabled() or _checkpoints_itself(self):
        return mark.inner(self, *args, **kwargs)
    return run_checkpointed(mark.inner, self, args, _without_cache(self, kwargs), mark.offload)


def mark_block(module: nn.Module, offload: BlockOffload | None = None) -> None:
    """Checkpoint the block from now on, and offload its inputs if ``offload`` says where to."""
    set_mark(module, BlockMark(offload), forward)


def unmark_block(module: nn.Module) -> None:
    """Undo :func:`mark_block`."""
    remove_mark(module, BlockMark, forward)


def find_checkpointable(model: nn.Module, policy: Checkpointing) -> list[tuple[str, nn.Module]]:
    """The blocks that the policy names, or with ``"auto"`` the model's repeated layers.

    Raises:
        ValueError: If a target matches nothing, or ``"auto"`` finds nothing.
    """
    if policy.targets != "auto":
        return find_named(model, policy.targets, "Checkpointing")
    found = find_blocks(model)
    if not found:
        raise NothingFound(
            f"Checkpointing found no blocks in {type(model).__name__} (repeated children of a ModuleList or Sequential): name them, as in"
            " Checkpointing(targets=['MyBlock']), or turn checkpointing off with checkpointing=False."
        )
    return found


class OwnCheckpointingOff:
    """Turns a model's own gradient checkpointing off where our blocks take over, so that nothing is recomputed twice."""

    def __init__(self, model: nn.Module) -> None:
        self.switched = [m for _, m in [("", model), *walk(model)] if _checkpoints_itself(m)]
        for module in self.switched:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if self.switched:
            warn(
                f"{type(model).__name__} checkpoints its own layers (gradient_checkpointing_enable): that is off while lt_tiled checkpoints"
                " them. Turn off either one to be rid of this message."
            )

    def undo(self) -> None:
        for module in self.switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def _checkpoints_itself(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""The names that Hugging Face's layers have for their key-value cache."""


def _without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave an empty key-value cache out, as Hugging Face does: the recompute would append to it a second time.

    Raises:
        ValueError: If the cache holds something, which the block would then miss.
    """
    held = [] if getattr(module, "_can_checkpoint_with_cache", False) else [n for n in _CACHES if kwargs.get(n) is not None]
    if not held and not kwargs.get("use_cache"):
        return kwargs
    kind = type(module).__name__
    for name in held:
        cache = kwargs[name]
        tokens = cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache)
        if tokens:
            raise ValueError(
                f"{kind} is checkpointed and was given {name} with {tokens} cached entries: the recompute would append to it again. Run"
                " without a cache, or under torch.no_grad(), or with checkpointing=False."
            )
    inform_once(f"cache {kind}", f"{kind} is checkpointed, so it runs without a key-value cache while gradients are on")
    return {**kwargs, **dict.fromkeys(held), **({"use_cache": False} if "use_cache" in kwargs else {})}
