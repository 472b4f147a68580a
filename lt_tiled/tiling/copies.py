"""Shallow copies of modules with leaves in place of their trainable weights: see NOTE [Substitution]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.modules.patch import Patch, is_of
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.weights import Weight


class Copies:
    """Copies of a work's modules, for one backward pass. The modules themselves stay as they are.

    A copy shares everything with its module but the dictionaries of its attributes, parameters and submodules. What
    its code sets is lost with it.

    Args:
        work: The work.
        weights: Its trainable weights.
        leaves: What the copies hold in place of each.
    """

    def __init__(self, work: Work, weights: Sequence[Weight], leaves: Sequence[Tensor]) -> None:
        self._parts = set(work.parts())
        pairs = zip(weights, leaves, strict=True)
        self._leaves = {(owner, name): leaf for weight, leaf in pairs for owner, name in weight.places}
        self._made: dict[nn.Module, nn.Module] = {}
        self._direct: list[tuple[nn.Module, str]] = []
        """The parameters and submodules that stand among a copy's attributes too."""
        self.function = self._on_copies(work.function)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module."""
        if module not in self._made:
            self._copy(module)
        return self._made[module]

    def _copy(self, module: nn.Module) -> None:
        cls = type(module)
        copy = self._made[module] = object.__new__(cls)
        held = copy.__dict__
        held.update(module.__dict__)
        for name in ("_parameters", "_buffers"):
            entries = dict(module.__dict__[name].items())
            found = {entry: self._leaves[module, entry] for entry in entries if (module, entry) in self._leaves}
            if found or name == "_parameters":  # a buffer that the code replaces is the module's own
                held[name] = {**entries, **found}
        children = module.__dict__["_modules"].items()
        held["_modules"] = {name: self.of(part) if part in self._parts else part for name, part in children}
        for name, value in module.__dict__.items():
            if (module, name) in self._leaves:
                held[name] = self._leaves[module, name]
            elif isinstance(value, MethodType) and value.__self__ is module:
                held[name] = MethodType(value.__func__, copy)
        if cls.__getattr__ is nn.Module.__getattr__:  # which takes ten times as long as an attribute
            for name, value in (*held["_parameters"].items(), *held["_modules"].items()):
                if not hasattr(cls, name):
                    held[name] = value
                    self._direct.append((copy, name))

    def _on_copies(self, function: Any) -> Any:
        """Return a function that reaches its modules through its arguments, on the copies."""
        if isinstance(function, partial):
            return partial(self._on_copies(function.func), *map(self._on_copies, function.args), **function.keywords)
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            return MethodType(function.__func__, self.of(function.__self__))
        return self.of(function) if isinstance(function, nn.Module) else function

    def check(self, module: str) -> None:
        """Refuse code that sets a parameter or a submodule, which the attributes of a copy would not follow.

        Raises:
            RuntimeError: If there is one.
        """
        for copy, name in self._direct:
            holder = copy._parameters if name in copy._parameters else copy._modules
            if name in copy.__dict__ and copy.__dict__[name] is not holder.get(name):
                raise RuntimeError(
                    f"{module}: its forward sets {type(copy).__name__}.{name}, a parameter or a submodule, which its"
                    " tiles cannot follow. Set a plain attribute instead, or lt_tiled.untile() the module."
                )


def can_copy(work: Work) -> bool:
    """Whether the work reaches all of its modules through the arguments of its function and their submodules."""
    return _reaches_by_arguments(work.function) and all(map(_is_plain, work.parts()))


def _reaches_by_arguments(function: Any) -> bool:
    if isinstance(function, partial):
        return all(map(_reaches_by_arguments, (function.func, *function.args)))
    if isinstance(function, MethodType) and isinstance(function.__self__, Patch):
        return function.__self__.own
    return isinstance(function, nn.Module | MethodType) or is_of(function, ("lt_tiled.",))


def _is_plain(module: nn.Module) -> bool:
    """Whether an object of the same class with the same attributes does the same: not so for TorchScript."""
    forward = module.__dict__.get("forward")
    bound = forward is None or (isinstance(forward, MethodType) and forward.__self__ is module)
    slots = any(base.__dict__.get("__slots__") for base in type(module).__mro__)
    return bound and not slots and not isinstance(module, torch.jit.ScriptModule)
