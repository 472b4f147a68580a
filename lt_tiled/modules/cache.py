"""Calls of transformers' models: their arguments and key-value caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from lt_tiled.modules.find import has_class, walk


def leave_out_caches(model: nn.Module, undo: ExitStack) -> None:
    """Let the models of transformers in a model make no key-value cache in training, until ``undo`` is closed.

    They make one by default, which nobody reads in training and which would hold the keys and values of all layers.
    """
    for _, module in walk(model):
        if has_class(module, ("PreTrainedModel",)):
            undo.callback(module.register_forward_pre_hook(_leave_out_cache, with_kwargs=True).remove)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave_out_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set ``use_cache=False`` unless the caller decides, or wants neither gradients nor a loss."""
    function = type(module).forward
    given = by_name(function, args, kwargs)
    decided = given.get("use_cache") is not None or has_cache(given)
    trains = torch.is_grad_enabled() or module.training or given.get("labels") is not None
    if decided or not trains or "use_cache" not in argument_names(function)[len(args) :]:
        return None
    return args, kwargs | {"use_cache": False}


@cache
def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments that may be given by position."""
    parameters = [*inspect.signature(function).parameters.values()][1:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method by name, or by position for those that have none."""
    known = argument_names(function)
    given: dict[str, Any] = {}
    for index, value in enumerate(args):
        given[known[index] if index < len(known) else str(index)] = value
    return given | kwargs


def has_cache(given: dict[str, Any]) -> bool:
    """Whether there is a key-value cache of transformers among arguments."""
    return any(cls.__name__.endswith("Cache") for value in given.values() for cls in type(value).__mro__)


def is_no_tuple(node: Any) -> bool:
    """Whether pytree leaves a container of arguments as it is.

    Pytree keeps this function alive until garbage is collected, so it must not refer to the arguments.
    """
    return not isinstance(node, tuple) or isinstance(node, torch.Size)  # of which pytree makes a plain tuple
