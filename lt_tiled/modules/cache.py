"""Key-value caches of blocks that are recomputed: which ones a call keeps, and which it leaves out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from lt_tiled._log import inform
from lt_tiled.modules.find import has_class, walk
from lt_tiled.modules.patch import Order, Patch, get_patch, patch_until

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""The argument names of the key-value cache in Hugging Face's layers. A ``Cache`` counts under any name, as XLM's."""
_LEFT_OUT = "_lt_tiled_left_out"
"""An attribute of a cache that a call left out, and of its copies. It holds that call, whose tokens the cache lacks."""


@dataclass(eq=False)
class CacheCall:
    """A call of a transformers model, and whether its caller asks for a key-value cache or gives one.

    Models make a cache by default, also in training, where nobody reads it and it would hold the keys and values of all
    layers. Blocks cannot tell such a cache from one that the caller wants.
    """

    wants_cache: bool


_call: ContextVar[CacheCall | None] = ContextVar("call", default=None)
"""The outermost call that runs."""


class CachePatch(Patch):
    """On each model of transformers, because only the one that is called first knows what its caller wants."""

    order = Order.CACHE

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _call.get() is not None:
            return self.inner(module, *args, **kwargs)
        given = by_name(type(module).forward, args, kwargs)
        token = _call.set(CacheCall(given.get("use_cache") is True or bool(caches_in(given))))
        try:
            return self.inner(module, *args, **kwargs)
        finally:
            _call.reset(token)


def patch_models(model: nn.Module, undo: ExitStack) -> None:
    """Let blocks know what the callers of transformers models want, until ``undo`` is closed."""
    for module in (model, *(module for _, module in walk(model))):
        if has_class(module, ("PreTrainedModel",)) and get_patch(module, CachePatch) is None:
            patch_until(undo, module, CachePatch())


def without_unread_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove a key-value cache that a model made and nobody asked for. Others are restored for the recompute."""
    given = by_name(type(module).forward, args, kwargs) if len(args) > 1 else kwargs  # a cache is not the first one
    if getattr(module, "_can_checkpoint_with_cache", False):  # transformers' layers that restore their cache
        return args, kwargs
    caches, kind = caches_in(given), type(module).__name__
    call = _call.get()
    states = [getattr(cache, "__dict__", {}) for cache in caches.values()]
    before = [state[_LEFT_OUT] for state in states if _LEFT_OUT in state]
    if call is not None and any(other is not call for other in before):
        raise ValueError(
            f"{kind} uses activation checkpointing and was given {next(iter(caches))} again, which it left out of"
            " the call before, so it lacks those tokens. Pass use_cache=True to each call, or run all calls with"
            " this cache under torch.no_grad(), or with activation_checkpointing=False."
        )
    unread = call is not None and not call.wants_cache and torch.is_grad_enabled()
    leaves_out = unread or bool(before)  # in the recompute of somebody else's checkpoint there is no call
    for state in states if unread else ():
        state[_LEFT_OUT] = call
    if not leaves_out or not (caches or given.get("use_cache")):
        return args, kwargs
    inform(f"{kind} is recomputed, so it runs without a key-value cache while gradients are on", once=f"cache {kind}")
    instead = {**dict.fromkeys(caches), "use_cache": False}
    names = argument_names(type(module).forward) if len(args) > 1 else []
    args = tuple(instead.get(name, arg) for name, arg in zip(names, args, strict=False)) + args[len(names) :]
    return args, {name: instead.get(name, value) for name, value in kwargs.items()}


@cache
def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments that may be given by position."""
    parameters = [*inspect.signature(function).parameters.values()][1:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method by name, or by position for those that have none."""
    known = argument_names(function)
    names = [*known, *(str(index) for index in range(len(known), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def caches_in(given: dict[str, Any]) -> dict[str, Any]:
    """Return the key-value caches among arguments by name."""
    present = {name: value for name, value in given.items() if value is not None}
    return {name: value for name, value in present.items() if name in CACHES or hasattr(value, "get_seq_length")}
