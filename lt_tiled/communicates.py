"""Whether a block runs collectives: what its first call shows, and what its modules and their code name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.modules.patch import is_of
from lt_tiled.tiling.reach import is_users, names_in

_ENGINES = ("torch.distributed.", "deepspeed.")
_COLLECTIVES = ("torch.distributed", "deepspeed.comm")


class Collectives(TorchDispatchMode):
    """Notes whether a collective runs inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled tiles run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        # Operators of lt_tiled hide the collectives that they run.
        self.seen = self.seen or "c10d" in func.namespace or func.namespace == "lt_tiled"
        return func(*args, **(kwargs or {}))


def has_engine_inside(block: nn.Module) -> bool:
    """Whether an engine has hooks in a block, as for FSDP units in it and modules whose weights ZeRO-3 gathers."""
    inside = [module for module in block.modules() if module is not block]
    parts = [part for module in inside for part in (type(module), *module._forward_pre_hooks.values())]
    return any(is_of(part, _ENGINES) for part in parts)


def names_collectives(block: nn.Module) -> bool:
    """Whether code that the ``forward`` of a block reaches names ``torch.distributed``."""
    parts = [*block.modules()]
    hooks = [hook for part in parts for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    todo: list[tuple[Any, Any]] = [(type(part), type(part).forward) for part in parts]
    todo += [(None, hook) for hook in hooks if is_users(hook)]
    known = set()
    while todo:
        owner, function = todo.pop()
        function = getattr(function, "fget", getattr(function, "__func__", function))
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or (owner, function.__code__) in known:
            continue
        known.add((owner, function.__code__))
        names = names_in(function.__code__)
        values = _values_of(function, names)
        if "distributed" in names or any(map(_is_collective, values)):
            return True
        todo += [(value, value.forward) for value in values if _is_autograd_function(value)]
        todo += [(owner, value) for value in values if isinstance(value, FunctionType) and is_users(value)]
        methods = [getattr(owner, name, None) for name in names]
        todo += [(owner, method) for method in methods if not _is_collective(method)]  # those of FSDP2's classes
    return False


def _values_of(function: FunctionType, names: Sequence[str]) -> list[Any]:
    """Return the globals and variables of closures with these names, and what modules among them have."""
    values = [function.__globals__.get(name) for name in names]
    modules = [value for value in values if isinstance(value, ModuleType) and is_users(value)]
    values += [vars(module).get(name) for module in modules for name in names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    return values


def _is_collective(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).startswith(_COLLECTIVES)


def _is_autograd_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)
