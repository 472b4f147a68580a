"""Which calls are alike, so that the self-check of one of them holds for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lt_tiled.modules.patch import Patch, is_of, is_patched
from lt_tiled.tiling.places import ATOMS, ENGINES, LEAF_HOOKS, Place, is_weight
from lt_tiled.tiling.reach import MAX_ENTRIES, is_object, place_of, read_by, read_by_class
from lt_tiled.tiling.recompute import hidden_from_modes
from lt_tiled.tiling.tiled_call import TiledCall

_FEW = 256
"""Larger buffers are not compared by value."""
_OF_ENGINES = ("torch.distributed.", "deepspeed.", "lt_tiled.")


def signature(call: TiledCall, inputs: Sequence[Tensor]) -> Hashable | None:
    """Return a value that is equal for calls that run the same code on modules of the same kind, in the same mode.

    It holds all that their code can read: classes, attributes, hooks, closures and globals by value, weights by their
    form and by whether they are zero, which may hide what mixes tokens, and scalar weights by value. The names of
    modules are left out.

    Returns:
        ``None`` if something cannot be compared, such as a tensor subclass, a process group or a large buffer. So
        modules that communicate are checked on all ranks.
    """
    facts, lead = _Facts(), len(call.shape.lead)
    (_, tree, _, *form), *case = call.mode  # without the switches, which are attributes
    try:
        with hidden_from_modes(inputs[0]):
            given = tuple(
                (type(t), t.dtype, t.device, t.shape[lead:]) if per_token else facts.of(t)
                for t, per_token in zip(inputs, call.per_token, strict=True)
            )
            code = facts.of((call.work.function, call.work.modules, call.arguments.others))
        found = (tree, *form, *case, given, code)
        hash(found)
    except Exception:  # of what users' own classes do where they are asked for their attributes
        return None
    return found


class _Facts:
    """Describes values, so that what is alike has equal descriptions."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}
        """The number of each value, and the value, which keeps its id from being used again."""

    def of(self, value: Any) -> Hashable:
        """Describe a value.

        Raises:
            TypeError: If it cannot be compared.
        """
        kind = type(value)
        if kind in ATOMS or isinstance(value, type | ModuleType):
            return kind, value
        if isinstance(value, tuple):
            return kind, tuple(map(self.of, value))
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, list | deque | dict | set | frozenset):
            return kind, self._container(value), self.of(vars(value)) if is_object(value) else None
        if isinstance(value, Patch):  # which does not change what the module computes
            return self.of(value.below)
        if is_patched(value):
            return "patched"
        plain = kind is SimpleNamespace or (kind.__basicsize__, kind.__itemsize__) == _ATTRIBUTES_ALONE
        if plain and is_object(value):
            return kind, self.of(vars(value))
        return kind, self._code(kind, value)

    def _container(self, value: Any) -> Hashable:
        if len(value) > MAX_ENTRIES or hasattr(value, "default_factory"):
            raise TypeError(f"{len(value)} entries are too many to be compared, or there are defaults")
        if isinstance(value, dict):
            return tuple((self.of(key), self.of(entry)) for key, entry in value.items())
        described = map(self.of, value)
        return frozenset(described) if isinstance(value, set | frozenset) else tuple(described)

    def _code(self, kind: Any, value: Any) -> Hashable:
        if isinstance(value, nn.Module):
            # The arguments that made a layer of peft hold its name, and no forward reads them.
            left_out = ENGINES | {"kwargs"} if kind.__module__.startswith("peft.") else ENGINES
            held = {name: a for name, a in value.__dict__.items() if not name.endswith(LEAF_HOOKS)}
            attributes = {name: _hooks(name, a) for name, a in held.items() if name not in left_out}
            forward = getattr(kind.forward, "__code__", None)
            return forward, self.of(attributes), self._shared(read_by_class(kind))
        if isinstance(value, FunctionType):
            own = self.of((value.__defaults__, value.__kwdefaults__, vars(value), value.__closure__))
            return value.__code__, value.__module__, own, self._shared(read_by(value))
        if isinstance(value, CellType):
            return self.of(Place("", value).read())
        if isinstance(value, MethodType):
            return self.of((value.__func__, value.__self__))
        if isinstance(value, partial):
            return self.of((value.func, value.args, value.keywords))
        if isinstance(value, BuiltinFunctionType):
            return value.__name__, self.of(value.__self__)
        raise TypeError(f"a {kind.__name__} cannot be compared")

    def _shared(self, sources: Sequence[tuple[Any, tuple[str, ...]]]) -> Hashable:
        return tuple(self.of(place_of(*source).read()) for source in sources)


_ATTRIBUTES_ALONE = _Facts.__basicsize__, 0
"""The sizes of objects that hold attributes alone: no slots, and no value of a built-in class below theirs."""


def _hooks(name: str, value: Any) -> Any:
    """Return the hooks in an attribute of a module, those of engines by name; other attributes as they are."""
    if not isinstance(value, dict) or "_hooks" not in name:
        return value
    if "state_dict" in name:
        return None
    hooks: list[tuple[Any, Any]] = [(hook, getattr(hook, "func", hook)) for hook in value.values()]
    return [code.__qualname__ if is_of(hook, _OF_ENGINES) else hook for hook, code in hooks]


def _tensor(tensor: Tensor) -> Hashable:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor._backward_hooks:
        raise TypeError(f"a {type(tensor).__name__} with hooks, or of a class of its own, cannot be compared")
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    if is_weight(tensor) and tensor.numel() > 1:  # one number may be a gate that code branches on
        return (*form, bool(tensor.flatten()[:_FEW].any()) or bool(tensor.any()))  # mostly the first ones tell
    if tensor.numel() > _FEW:
        raise TypeError(f"{tensor.numel()} values are too many to be compared")
    return (*form, tuple(tensor.flatten().tolist()))
