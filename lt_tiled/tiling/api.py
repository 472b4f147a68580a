"""Tiling a module, a method or a callable: mark and unmark."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lt_tiled._log import warn
from lt_tiled.errors import NotPositionWiseError
from lt_tiled.modules.feed_forward import Tileable, drops_samples, feed_forward_widths, has_capacity, parts_below
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import get_mark, get_marks, place_of, remove_mark, set_mark
from lt_tiled.policies import CompileOptions, Tiling
from lt_tiled.tiling.autograd import check_and_run, run_tiled
from lt_tiled.tiling.deferred import begin_chain, gives_a_tensor, mark_chain, unmark_chains, values
from lt_tiled.tiling.recorded import Recorded, refuse_recorded
from lt_tiled.tiling.self_check import check_first
from lt_tiled.tiling.state import TileMark
from lt_tiled.tiling.tiled_call import TiledCall
from lt_tiled.tiling.work import Work

Target = TypeVar("Target", bound=Callable[..., Any])


@cache
def tiled_method(name: str) -> Callable[..., Any]:
    """What runs in place of a tiled module's method of that name, which is what pickle looks up on the class."""
    place = place_of(TileMark, name)

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mark = self.__dict__[place]
        lazily = mark.chained and not mark.hooked and not torch.compiler.is_compiling()
        if not mark.active or mark.whole or not (mark.alone or lazily):
            return mark.inner(self, *args, **kwargs)
        return _call(self, mark, lazily, args, kwargs)

    method.__name__ = name
    return method


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(module: nn.Module, mark: TileMark, lazily: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = values((args, kwargs))
    call = TiledCall(Work(partial(mark.inner, module), (module,)), mark, args, kwargs)
    if len(call.bounds) < 2:
        return call.work.function(*args, **kwargs)
    if not mark.alone:
        return begin_chain(call, args, kwargs)
    try:
        refuse_recorded(call)
        check_first(call)
    except NotPositionWiseError as error:
        if not (mark.below or isinstance(error, Recorded)):
            raise
        _step_back(module, mark, error)
        return mark.inner(module, *args, **kwargs)
    return (
        begin_chain(call, args, kwargs)
        if lazily and torch.is_grad_enabled() and gives_a_tensor(call)
        else run_tiled(call)
    )


def _step_back(module: nn.Module, mark: TileMark, reason: NotPositionWiseError) -> None:
    """Run a mixture of experts whole and its experts, below the router, in tiles.

    From now on, because a recompute in the backward, which records nothing, must take the forward's way.
    """
    mark.whole = True
    parts = dict(walk(module))
    for path in mark.below:
        if get_mark(part := parts[path], TileMark) is None:
            below = mark_tiled(Tileable(f"{mark.name}.{path}", part, kind=type(part).__name__), mark.tiling, mark.owner)
            below.zeros_for_unused = mark.zeros_for_unused
    instead = f"Below its router {' and '.join(mark.below)} run in tiles." if mark.below else "It runs whole."
    warn(f"{reason} {instead}")


def tile(
    target: Target,
    *,
    num_shards: int | Literal["auto"] = "auto",
    tile_tokens: int | None = None,
    accumulate: Literal["float32", "param"] = "float32",
    self_check: bool = True,
    reductions: Mapping[str, Literal["sum", "mean"]] | None = None,
    compile: bool | CompileOptions = False,
) -> Target:
    """Let one token-wise module, method or function run tile by tile.

    Its results, gradients, keys and hooks stay as they are; the intermediates of one tile at a time are alive.

    Args:
        target: What works token by token on hidden states ``[B, S, H]`` or ``[T, H]``. A module (an MLP, an MoE block,
            a norm) or a module's method (``layer.feed_forward_chunk``) is tiled in place. Of any other callable, a
            tiled one is returned; its weights are those of the modules in its closure, its arguments (of
            ``functools.partial``) or its attributes.
        num_shards: Tiles per call, or ``"auto"``.
        tile_tokens: Tokens per tile: the other way to say it.
        accumulate: The dtype in which weight gradients of 16-bit weights are summed.
        self_check: Compare a few tokens whole and in tiles at the first tiled call.
        reductions: How outputs that are not per token go together; see :class:`~lt_tiled.policies.Tiling`.
        compile: Compile the tile's forward and backward; see :class:`~lt_tiled.policies.Tiling`.

    Returns:
        The same module; or the tiled method or function, to be called in the place of the other.

    Raises:
        ValueError: If it is tiled already, or normalises over the batch, or a value is out of bounds.
        TypeError: If it cannot be called.
    """
    policy = Tiling(
        num_shards, tile_tokens, accumulate=accumulate, self_check=self_check, reductions=reductions, compile=compile
    )
    owner, method = _owner(target)
    if owner is None:
        return TiledCallable(target, policy)  # type: ignore[return-value]
    kind = type(owner).__name__ if owner is target else f"{type(owner).__name__}.{method}"
    mark_tiled(Tileable(kind, owner, method, kind=kind, suffix="" if owner is target else f".{method}"), policy, None)
    return target if owner is target else getattr(owner, method)


def untile(target: Target) -> Target:
    """Undo :func:`tile`: a module or method is as it was; of a tiled function, the function itself is returned.

    Does nothing to what is not tiled.
    """
    owner, method = _owner(target)
    if owner is None:
        return target.function if isinstance(target, TiledCallable) else target  # type: ignore[return-value]
    mark = get_mark(owner, TileMark, method)
    if mark is not None:
        remove_mark(owner, TileMark, tiled_method(method))
        parts = dict(walk(owner))
        for path in mark.below if mark.whole else ():
            untile(parts[path])
    return target if owner is target else getattr(owner, method)


def _owner(target: Any) -> tuple[nn.Module | None, str]:
    """The module whose method the target is, and the method's name; no module for other callables."""
    if isinstance(target, nn.Module):
        return target, "forward"
    if isinstance(target, MethodType) and isinstance(target.__self__, nn.Module):
        return target.__self__, target.__name__
    if not callable(target):
        raise TypeError(
            f"{target!r} is a {type(target).__name__}: give a module, a module's method, or a function of tensors."
        )
    return None, ""


class TiledCallable:
    """A function that runs tile by tile, to be called like the function."""

    def __init__(self, function: Callable[..., Any], tiling: Tiling) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.mark = TileMark(tiling, name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = values((args, kwargs))
        call = TiledCall(Work(self.function, modules_of(self.function)), self.mark, args, kwargs)
        return check_and_run(call) if len(call.bounds) > 1 else self.function(*args, **kwargs)


def modules_of(function: Callable[..., Any]) -> tuple[nn.Module, ...]:
    """The modules that a function reaches: in its closure and globals, bound to it, or among the attributes of a
    callable object.
    """
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


def mark_tiled(tileable: Tileable, tiling: Tiling, owner: object) -> TileMark:
    """Hang the tiling on what was found, for its owner to take off again."""
    module, name = tileable.module, tileable.name
    if get_mark(module, TileMark, tileable.method) is not None:
        raise ValueError(f"{name} is tiled already: call lt_tiled.untile() on it first.")
    for below, part in [("", module), *walk(module)]:
        if reason := _depends_on_others(part):
            raise ValueError(
                f"{name} is not token-wise: {below or 'it'} is a {type(part).__name__}, {reason}. Leave it out of targets."
            )
    mark = TileMark(tiling, name, tileable.kind)
    mark.owner, mark.alone, mark.chained = owner, tileable.alone, tileable.parent is not None
    halves = [module, *(m for m, _ in tileable.members[:1] if not tileable.alone)]
    mark.widths = feed_forward_widths(*halves)
    mark.weight_bytes = sum(weight_bytes(half) for half in halves)
    mark.suffix = tileable.suffix
    mark.below = parts_below(module) if tileable.method == "forward" else ()
    set_mark(module, mark, tiled_method(tileable.method))
    if tileable.parent is not None:
        mark_chain(tileable.parent, tileable.members, owner)
    return mark


def _depends_on_others(part: nn.Module) -> str | None:
    """Why a part is not token-wise though a few tokens may not show it."""
    if isinstance(part, _BatchNorm):
        return "whose statistics in training depend on all tokens"
    if has_capacity(part):
        return "whose experts have a capacity, so that what becomes of a token depends on all tokens"
    if drops_samples(part):
        return "which drops whole samples and would drop tiles"
    return None


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights, those of other ranks too where ZeRO-3 shards them."""
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in module.parameters() if not is_lazy(p))


def unmark(model: nn.Module, owner: object) -> None:
    """Take off all marks that the owner set, on copies of the modules (peft's ``modules_to_save``) too."""
    for _, module in [("", model), *walk(model)]:
        for mark in get_marks(module, TileMark):
            if mark.owner is owner:
                remove_mark(module, TileMark, tiled_method(mark.method))
        unmark_chains(module, owner)


def tile_marks(model: nn.Module) -> Iterator[tuple[str, nn.Module, TileMark]]:
    """What is tiled now: path, module and mark of each."""
    for path, module in [("", model), *walk(model)]:
        for mark in get_marks(module, TileMark):
            yield path, module, mark
