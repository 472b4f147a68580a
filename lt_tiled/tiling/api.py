"""Tiling a module, a method or a callable, and undoing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, Literal, TypeVar

from torch import nn

from lt_tiled.modules.feed_forward import Tileable
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import get_patch, remove_patch
from lt_tiled.policies import CompileOptions, Tiling
from lt_tiled.tiling.autograd import run_tiled
from lt_tiled.tiling.deferred import values
from lt_tiled.tiling.patched import TiledPatch, Untiled, accept, decide, patch_tiled
from lt_tiled.tiling.state import EngineNeeds, Found, Tiled
from lt_tiled.tiling.weights import Work

Target = TypeVar("Target", bound=Callable[..., Any])


def tile(
    target: Target,
    num_shards: int | Literal["auto"] = "auto",
    *,
    tile_tokens: int | None = None,
    accumulate: Literal["float32", "param"] = "float32",
    self_check: bool = True,
    reductions: Mapping[str, Literal["sum", "mean"]] | None = None,
    compile: bool | CompileOptions = False,
) -> Target:
    """Let one position-wise module, method or function run tile by tile.

    Its results, gradients, ``state_dict`` keys and hooks do not change; only the intermediates of one tile are alive.

    Args:
        target: What works position by position on hidden states ``[B, S, H]`` or ``[T, H]``. A module (an MLP, an MoE
            block, a norm) or a module's method (``layer.feed_forward_chunk``) is tiled in place. Of any other callable,
            a tiled one is returned; its weights are those of the modules in its closure, its arguments (of
            ``functools.partial``) or its attributes.
        num_shards: This and the others are fields of :class:`~lt_tiled.Tiling`.
        tile_tokens: The most tokens of a tile.
        accumulate: The dtype in which gradients of 16-bit weights are summed.
        self_check: Whether to compare a few tokens with and without tiles in the first call.
        reductions: How to combine outputs that are not per token.
        compile: Whether, or with which arguments of ``torch.compile``, to compile the module's own forward.

    Returns:
        The same module; or the tiled method or function, to be called in the place of the other.

    Raises:
        ValueError: If it is tiled already, or normalizes over the batch, or a value is out of bounds.
        TypeError: If it cannot be called.
    """
    policy = Tiling(
        num_shards,
        tile_tokens,
        accumulate=accumulate,
        self_check=self_check,
        reductions=reductions,
        compile=compile,
    )
    owner, method = _owner(target)
    if owner is None:
        return TiledCallable(target, policy)  # type: ignore[return-value]
    kind = type(owner).__name__ if owner is target else f"{type(owner).__name__}.{method}"
    patch_tiled(Tileable(kind, owner, kind, method, named=True), policy, EngineNeeds(), None)
    return target if owner is target else getattr(owner, method)


def untile(target: Target) -> Target:
    """Undo :func:`tile`. Does nothing to what is not tiled.

    Returns:
        The module or method as it was; of a tiled function, the function itself.
    """
    owner, method = _owner(target)
    if owner is None:
        return target.function if isinstance(target, TiledCallable) else target  # type: ignore[return-value]
    patch = get_patch(owner, TiledPatch, method)
    if patch is not None:
        remove_patch(owner, patch)
        parts = dict(walk(owner))
        for path in patch.found.below if patch.learned.untiled else ():
            untile(parts[path])
    return target if owner is target else getattr(owner, method)


def _owner(target: Any) -> tuple[nn.Module | None, str]:
    """Return the module whose method the target is, and the method's name; no module for other callables."""
    if isinstance(target, nn.Module):
        return target, "forward"
    if isinstance(target, MethodType) and isinstance(target.__self__, nn.Module):
        return target.__self__, target.__name__
    if not callable(target):
        raise TypeError(
            f"{target!r} is a {type(target).__name__}: pass a module, a module's method, or a function of tensors."
        )
    return None, ""


class TiledCallable:
    """A function that runs tile by tile, to be called like the function."""

    def __init__(self, function: Callable[..., Any], tiling: Tiling) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.patch = Tiled(Found(name, name), tiling, EngineNeeds())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = values((args, kwargs))
        work = Work(self.function, modules_of(self.function), whole=False)
        decision = decide(work, self.patch, args, kwargs)
        if isinstance(decision, Untiled):
            accept(decision, None, self.patch)
            return self.function(*args, **kwargs)
        return run_tiled(*decision)


def modules_of(function: Callable[..., Any]) -> tuple[nn.Module, ...]:
    """Return the modules that a function reaches: in its closure and globals, bound to it, or among its attributes."""
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.values()]
        return (*modules_of(function.func), *(v for v in values if isinstance(v, nn.Module)))
    if isinstance(function, nn.Module):
        return (function,)
    if isinstance(function, MethodType):
        return (*modules_of(function.__func__), *modules_of(function.__self__))  # type: ignore[arg-type]
    if inspect.isfunction(function):
        reached = inspect.getclosurevars(function)
        values = [*reached.nonlocals.values(), *reached.globals.values()]
    else:
        values = list(getattr(function, "__dict__", {}).values())
    return tuple(v for v in values if isinstance(v, nn.Module))
