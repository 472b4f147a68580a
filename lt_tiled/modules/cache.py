"""Calls of transformers' models: their arguments, their loss function, and the key-value caches of a recompute.

In training with activation checkpointing, caches that nobody asks for are not made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from lt_tiled._log import inform
from lt_tiled.modules.find import has_class, walk_all
from lt_tiled.modules.patch import Order, Patch, get_patch, patch_until


class CachePatch(Patch):
    """On each model of transformers, of which any may be called first.

    Models make a cache by default, also in training, where nobody reads it and it would hold the keys and values of all
    layers. As with transformers' own gradient checkpointing they make none in training and where gradients are on.
    """

    order = Order.CALLER

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = type(module).forward
        given = by_name(function, args, kwargs)
        undecided = given.get("use_cache") is None and not has_cache(given)
        trains = torch.is_grad_enabled() or module.training or given.get("labels") is not None
        if undecided and trains and "use_cache" in argument_names(function)[len(args) :]:
            kind = type(module).__name__
            inform(f"{kind} makes no key-value cache in training and while gradients are on", once=f"cache {kind}")
            kwargs = kwargs | {"use_cache": False}
        return self.inner(module, *args, **kwargs)


def patch_models(model: nn.Module, undo: ExitStack) -> None:
    """Let the models of transformers in a model make no unread cache, until ``undo`` is closed."""
    for _, module in walk_all(model):
        if has_class(module, ("PreTrainedModel",)) and get_patch(module, CachePatch) is None:
            patch_until(undo, module, CachePatch())


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


def has_cache(given: dict[str, Any]) -> bool:
    """Whether there is a key-value cache of transformers among arguments."""
    return any(cls.__name__.endswith("Cache") for value in given.values() for cls in type(value).__mro__)


@contextmanager
def loss_function_set(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Set the loss function of a transformers model for a while."""
    before = vars(model).get("_loss_function")
    model.loss_function = function
    try:
        yield
    finally:
        del model._loss_function  # the attribute of the property, which has no deleter
        if before is not None:
            model.loss_function = before
