"""What the code of some modules can read, found by following attributes, containers, classes, globals and closures."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lt_tiled.tiling.places import (
    ATOMS,
    Attributes,
    ClassData,
    Globals,
    Large,
    Place,
    RequiresGrad,
    Slots,
    changed,
    is_array,
    is_weight,
    storage_of,
)

SMALL = 2**20
"""Larger arrays, in bytes, are not looked into."""
DEPTH = 6
"""How many containers inside of each other are looked into."""
MAX_ENTRIES = 1000
"""Of larger containers only what is added is seen."""
_LIBRARIES = frozenset(("torch", "deepspeed", "accelerate", "lt_tiled", "numpy"))
_LIBRARIES |= {"lightning", "pytorch_lightning", "lightning_fabric"}
_LIBRARIES |= sys.stdlib_module_names - {"__main__"}
"""Packages whose own state is not looked into."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


Generator = tuple[Callable[[], Any], Callable[[Any], object]]
"""How to get the state of a generator of random numbers, and how to set it."""


class HeldTensor:
    """A tensor in a place of a module.

    Args:
        name: The name in messages.
        part: The number of the module; below zero for a tensor in a container, or in an object that is no module.
        holder: The dictionary that holds it.
        key: Its key there.
        tensor: The tensor.
        is_weight: Whether it is a weight.
    """

    def __init__(self, name: str, part: int, holder: Any, key: Any, tensor: Tensor, is_weight: bool) -> None:
        self.name, self.part, self.holder, self.key = name, part, holder, key
        self.has_graph = not is_weight and tensor.grad_fn is not None  # stale views of FSDP's weights raise here
        self.tensor = tensor.detach() if self.has_graph else tensor  # shares the version counter
        self.is_weight, self.requires_grad = is_weight, tensor.requires_grad
        self.storage = None if storage_of(tensor) is None else StorageWeakRef(tensor.untyped_storage())

    @property
    def is_kept(self) -> bool:
        """Whether this is a weight whose memory no engine can have freed."""
        return self.is_weight and self.storage is not None and self.tensor.untyped_storage().nbytes() > 0

    def __str__(self) -> str:
        return f"{self.name} of shape {list(self.tensor.shape)}"


class Reachable:
    """What code can read, as it is now.

    Args:
        modules: The modules whose code it is.
        values: What the code is given, by name.
        shared: Whether classes, globals, closures and hooks count.
        submodules: Whether those of the modules count.
    """

    def __init__(
        self, modules: Sequence[nn.Module], values: Mapping[str, Any], shared: bool = True, submodules: bool = True
    ) -> None:
        self.modules, self._shared = tuple(modules), shared
        self.places: list[Place] = []
        self.tensors: list[HeldTensor] = []
        self.generators: list[Generator] = []
        self._weights: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        """The parameters of each module."""
        self._flagged: list[Tensor] = []
        """Where a flag tells whether a gradient is wanted."""
        self._seen: set[Any] = set()
        self.lasts = True
        """Whether it holds no tensor that a step made, which must be freed with the step."""
        parts = dict.fromkeys(part for m in modules for part in (m.modules() if submodules else (m,)))
        self.mode = tuple(part.training for part in parts)
        for number, part in enumerate(parts):
            self._look_at_module(number, part)
        for key, value in values.items():
            if not isinstance(value, Tensor):  # those are inputs
                self._look_into(f"its argument {key}", value, DEPTH)
        if self._flagged:
            self.places.append(RequiresGrad("requires_grad of a weight", tuple(self._flagged)))
        self._seen.clear()

    def is_current(self, modules: Sequence[nn.Module]) -> bool:
        """Whether looking again would find the same for the code of these modules."""
        if len(modules) != len(self.modules) or not all(map(is_, modules, self.modules)):
            return False
        for parameters, recorded in self._weights:
            if len(parameters) != len(recorded) or not all(map(is_, parameters.values(), recorded)):
                return False
        for held in self.tensors:
            if held.storage is not None and held.tensor.untyped_storage()._cdata != held.storage.cdata:
                return False
        return not changed(self.places)

    def _look_at_module(self, number: int, part: nn.Module) -> None:
        if isinstance(part, torch.jit.ScriptModule):  # its state is no attribute in Python
            return
        kind = type(part).__name__
        self._weights.append((part._parameters, tuple(part._parameters.values())))
        for key, weight in part._parameters.items():
            if weight is None:
                continue
            self._flagged.append(weight)
            self.tensors.append(HeldTensor(f"{kind}.{key}", number, part._parameters, key, weight, True))
        for key, value in part.__dict__.items():
            if is_weight(value):
                self.tensors.append(HeldTensor(f"{kind}.{key}", number, part.__dict__, key, value, True))
                self._flagged.append(value)
            self.lasts = self.lasts and not isinstance(value, Tensor)
        self._look_at(Attributes(kind, part.__dict__), DEPTH, number)
        self._look_at(Place(kind, part._buffers), 0, number)
        self._look_at(Place(f"{kind}._modules", part._modules), 0)
        if not self._shared:
            return
        for source in read_by_class(type(part)):
            self._look_at_shared(*source)
        for name in _HOOKS:
            self._look_at(Place(f"{kind}.{name}", part.__dict__[name]), 0)
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            if is_users(getattr(hook, "func", hook)):
                self._look_into(f"a hook of {kind}", hook, DEPTH)

    def _look_at_shared(self, holder: Any, names: tuple[str, ...]) -> None:
        if (key := (id(holder), names)) in self._seen:
            return
        self._seen.add(key)
        self._look_at(place_of(holder, names), DEPTH)

    def _look_at(self, place: Place, depth: int, number: int = -1) -> None:
        """Record a place and, to a depth, what is in it; ``number`` is that of the module it belongs to."""
        self.places.append(place)
        for key, value in place.recorded.items():
            if type(value) in ATOMS:
                continue
            name = f"{place.name}.{key}" if isinstance(key, str) else place.name
            if isinstance(value, Tensor) and number >= 0:
                self._hold(name, number, place.holder, key, value)
            elif depth or isinstance(value, Tensor):
                self._look_into(name, value, depth - 1)

    def _hold(self, name: str, part: int, holder: Any, key: Any, tensor: Tensor) -> None:
        self.tensors.append(HeldTensor(name, part, holder, key, tensor, False))
        if tensor.is_leaf:
            self._flagged.append(tensor)

    def _look_into(self, name: str, value: Any, depth: int) -> None:
        """Record what a value holds, if anything."""
        if type(value) in ATOMS or id(value) in self._seen:
            return
        self._seen.add(id(value))  # it stays alive in its place
        with suppress(Exception):  # of what users' own classes do where they are asked for their attributes
            self._look_into_new(name, value, depth)

    def _look_into_new(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.lasts = False
            self._hold(name, -1 - len(self.tensors), None, None, value)
        elif (generator := _generator(value)) is not None:
            generator[0]()  # raises where the system draws the numbers
            self.generators.append(generator)
        elif isinstance(value, tuple | frozenset):
            for one in value if depth else ():
                if self.modules or not isinstance(one, Tensor):  # tensors in tuples of arguments are inputs as well
                    self._look_into(name, one, depth - 1)
        elif isinstance(value, dict | list | deque | set) or (
            is_array(value) and not value.dtype.hasobject and value.nbytes <= SMALL
        ):
            if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
                self.lasts = False
                self.places.append(Large(name, value))
            elif is_array(value) or len(value) <= MAX_ENTRIES:
                self._look_at(Place(name, value), depth)
            if is_object(value):  # of a subclass with attributes
                self._look_at(Place(name, value.__dict__), depth)
        elif isinstance(value, FunctionType):
            for source in read_by(value) if self._shared else ():
                self._look_at_shared(*source)
        elif isinstance(value, MethodType):
            for one in (value.__func__, value.__self__):
                self._look_into(name, one, depth)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._look_into(name, one, depth)
        elif is_object(value):
            self._look_at(Place(name, value.__dict__), depth)
        elif is_users(type(value)) and (slots := Slots(name, value)).recorded:
            self._look_at(slots, depth)


def global_generators() -> list[Generator]:
    """Return how to get and set the states of the generators of Python and, where it is imported, of NumPy."""
    generators: list[Generator] = [(random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append((functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state))
    return generators


def _generator(value: Any) -> Generator | None:
    """Return how to get and set the state of a generator of random numbers, if the value is one."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if not type(value).__module__.startswith("numpy.random"):
        return None
    if type(value).__name__ == "RandomState":
        return functools.partial(value.get_state, legacy=False), value.set_state
    bits = getattr(value, "bit_generator", value)
    return (lambda: bits.state), (lambda state: setattr(bits, "state", state))


# What the code of a class or a function names


_reads: WeakKeyDictionary[type, list[tuple[Any, tuple[str, ...]]]] = WeakKeyDictionary()
"""What :func:`read_by_class` found; classes by their place in the method resolution order, because values that refer to
a key would keep it alive."""


def read_by_class(cls: type) -> list[tuple[Any, tuple[str, ...]]]:
    """Return the classes, globals and variables of closures that the methods of a class may read."""
    found = _reads.get(cls)
    if found is None:
        found = _find_reads(cls)
        if not any(isinstance(holder, CellType) for holder, _ in found):  # which may refer to the class
            _reads[cls] = found
    return [(cls.__mro__[holder] if isinstance(holder, int) else holder, names) for holder, names in found]


def _find_reads(cls: type) -> list[tuple[Any, tuple[str, ...]]]:
    found: list[tuple[Any, tuple[str, ...]]] = []
    for index, base in enumerate(cls.__mro__):
        if not is_users(base):
            continue
        found.append((index, ("",)))
        for value in vars(base).values():
            if isinstance(function := getattr(value, "__func__", getattr(value, "fget", value)), FunctionType):
                found += read_by(function)
    return [(holder, names) for holder, names in found if names != ()]


def read_by(function: FunctionType) -> list[tuple[Any, tuple[str, ...]]]:
    """Return the globals and variables of closures that a function, and those of its module that it names, read."""
    found: list[tuple[Any, tuple[str, ...]]] = []
    todo, known = [function], {function.__code__}
    while todo:
        function = todo.pop()
        space, names = function.__globals__, names_in(function.__code__)
        for cell in function.__closure__ or ():
            value = Place("", cell).recorded.get(0)
            todo += [value] if isinstance(value, FunctionType) and value.__code__ not in known else []
            found += [(cell, ("",))] if is_data(value) else []
        for value in [space.get(name) for name in names]:
            if isinstance(value, FunctionType) and value.__globals__ is space and value.__code__ not in known:
                todo.append(value)
            elif isinstance(value, ModuleType) and is_users(value):
                found.append((vars(value), tuple(name for name in names if is_data(vars(value).get(name, value)))))
        known.update(one.__code__ for one in todo)
        found.append((space, tuple(name for name in names if is_data(space.get(name, function)))))
    return [(holder, names) for holder, names in found if names != ()]


def place_of(holder: Any, names: tuple[str, ...]) -> Place:
    """Return the place of what :func:`read_by` found."""
    if isinstance(holder, CellType):
        return Place("a variable of a closure", holder)
    return ClassData(holder, is_data) if isinstance(holder, type) else Globals(holder, names)


@functools.cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in some code and the functions inside it."""
    inside = (name for const in code.co_consts if isinstance(const, CodeType) for name in names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inside)))


def is_users(value: Any) -> bool:
    """Whether a class, function or module is neither of the standard library nor of the libraries that run models."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] not in _LIBRARIES


def is_object(value: Any) -> bool:
    """Whether a value has attributes that code may read as data."""
    if isinstance(value, type | nn.Module | Tensor | ModuleType | FunctionType):
        return False
    known = type(value).__name__ in ("SimpleNamespace", "Namespace", "UserDict", "UserList", "ChainMap")
    return (known or is_users(type(value))) and isinstance(getattr(value, "__dict__", None), dict)


def is_data(value: Any) -> bool:
    """Whether a value is data, and no code."""
    kinds = (tuple, list, dict, set, deque, Tensor, torch.Generator, random.Random)
    if type(value) in ATOMS:
        return type(value) is not type
    return isinstance(value, kinds) or is_array(value) or is_object(value)
