"""Tiling a module or one of its methods, and undoing it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, TypeVar

from torch import nn

from lt_tiled.engines.found import Engine
from lt_tiled.modules.feed_forward import Tileable
from lt_tiled.modules.patch import get_patch, remove_patches
from lt_tiled.policies import Tiling
from lt_tiled.tiling.patch import TiledPatch, patch_tiled

Target = TypeVar("Target", bound=Callable[..., Any])


def tile(
    target: Target,
    num_shards: int | Literal["auto"] = "auto",
    *,
    tile_tokens: int | None = None,
    accumulate: Literal["float32", "param"] = "float32",
    self_check: bool = True,
    compile: bool | dict[str, Any] = False,
) -> Target:
    """Run a position-wise module, or a method of a module, tile by tile.

    Results, gradients, ``state_dict`` keys and hooks do not change. Only one tile's intermediates exist at a time.

    Args:
        target: A module (an MLP, an MoE block, a norm) or a module's method (``layer.feed_forward_chunk``) that is
            position-wise on hidden states ``[B, S, H]`` or ``[T, H]``. It is tiled in place.
        num_shards: The number of tiles, as in :class:`~lt_tiled.Tiling`.
        tile_tokens: The largest number of tokens per tile.
        accumulate: The dtype in which gradients of 16-bit weights are summed.
        self_check: Whether to compare a few tokens with and without tiles in the first call.
        compile: Whether to compile the module's own forward, or the arguments of ``torch.compile`` for that.

    Returns:
        The same module, or the tiled method.

    Raises:
        ValueError: If it is already tiled, cannot be tiled, or a value is out of bounds. In the first call, if an
            engine would shard its weights between tiles.
        TypeError: If it is neither a module nor a module's method.
    """
    policy = Tiling(num_shards, tile_tokens, accumulate=accumulate, self_check=self_check, compile=compile)
    owner, method = _owner(target)
    patch_tiled(Tileable("", owner, method, named=True), policy, Engine(owner), object())
    return target if owner is target else getattr(owner, method)


def untile(target: Target) -> Target:
    """Undo :func:`tile`. Does nothing to what is not tiled.

    Returns:
        The module or method as it was.
    """
    owner, method = _owner(target)
    patch = get_patch(owner, TiledPatch, method)
    if patch is not None:
        remove_patches(owner, patch.owner)
    return target if owner is target else getattr(owner, method)


def _owner(target: Any) -> tuple[nn.Module, str]:
    """Return the module whose method the target is, and the method's name."""
    if isinstance(target, nn.Module):
        return target, "forward"
    if isinstance(target, MethodType) and isinstance(target.__self__, nn.Module):
        return target.__self__, target.__name__
    raise TypeError(
        f"{target!r} is a {type(target).__name__}, which cannot be tiled: pass a module or a module's method."
    )
