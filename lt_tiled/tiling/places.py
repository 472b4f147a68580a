"""Places where code finds values: attributes, containers, classes, globals, closures and generators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from operator import is_
from types import CellType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.modules.patch import is_patched

ENGINES = frozenset(("applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_external_params"))
ENGINES |= {"ds_id", "ds_grads_remaining", "ds_inflight_param_registry", "ds_recompute_parameters"}
ENGINES |= {"_z3_leaf", "_original_parameters"}
"""What ZeRO-3's hooks set on modules between the passes (runtime/zero/parameter_offload.py)."""
_NOT_READ = (frozenset(nn.Module().__dict__) - {"training"}) | ENGINES
ATOMS = frozenset((bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size, type))


class Place:
    """A container, or the attributes of an object: what was there, by name or index.

    Args:
        name: The name in messages.
        holder: A dictionary, list, deque, set, NumPy array, or a variable of a closure.
    """

    quick = True
    """Whether it suffices to compare the entries of the dictionary itself, which is fast."""

    def __init__(self, name: str, holder: Any) -> None:
        self.name, self.holder = name, holder
        found = self.read()
        self.recorded = {key: _without_graph(value) for key, value in found.items()}
        self.has_graphs = not all(map(is_, self.recorded.values(), found.values()))
        """Whether ``recorded`` has tensors without the graph that they have in their places."""
        self.dictionary = None if self.has_graphs else self._quick_dictionary()
        self.keys, self.values = tuple(self.dictionary or ()), tuple((self.dictionary or {}).values())

    def _quick_dictionary(self) -> Mapping[Any, Any] | None:
        return self.holder if self.quick and isinstance(self.holder, dict) else None

    def read(self) -> dict[Any, Any]:
        """Return what is there now."""
        if isinstance(self.holder, dict):
            return dict(self.holder.items())  # no lookups: with those ZeRO-3 gathers weights
        if isinstance(self.holder, CellType):
            with suppress(ValueError):  # it is empty
                return {0: self.holder.cell_contents}
            return {}
        return {0: self.holder.tobytes()} if is_array(self.holder) else dict(enumerate(self.holder))

    def differing(self, values: dict[Any, Any]) -> list[Any]:
        """Return the names at which there is something else than these values."""
        now = self.read()
        if now.keys() == values.keys() and all(map(is_, map(now.get, values), values.values())):
            return []
        both = values.keys() & now.keys()
        return [*(values.keys() ^ now.keys()), *(name for name in both if not _is_same(now[name], values[name]))]

    def restore(self, values: dict[Any, Any]) -> None:
        """Write these values back."""
        names, holder = self.differing(values), self.holder
        if names and isinstance(holder, list | deque | set):
            holder.clear()
            (holder.update if isinstance(holder, set) else holder.extend)(values.values())
        elif names and isinstance(holder, CellType) and values:
            holder.cell_contents = values[0]
        elif names and isinstance(holder, CellType):
            del holder.cell_contents
        elif names and is_array(holder):
            holder.flat = type(holder)(holder.shape, holder.dtype, values[0]).flat
        else:
            for name in names:
                self.set(name, values[name]) if name in values else self.remove(name)

    def set(self, name: Any, value: Any) -> None:
        self.holder[name] = value

    def remove(self, name: Any) -> None:
        self.holder.pop(name, None)


def changed(places: Iterable[Place]) -> list[Place]:
    """Return the places in which there is something else than when they were recorded."""
    found = []
    for place in places:  # in each step for each attribute of a model, so without calls of functions in Python
        now = place.dictionary
        same = now is not None and len(now) == len(place.keys) and all(map(is_, now, place.keys))
        if same and all(map(is_, now.values(), place.values)):  # type: ignore[union-attr]
            continue
        if place.differing(place.recorded):
            found.append(place)
    return found


class Attributes(Place):
    """The attributes of a module that its users set, and its training mode."""

    def read(self) -> dict[str, Any]:
        found = {}
        for name in self.holder.keys() - _NOT_READ:
            value = self.holder[name]
            data = type(value) in ATOMS or not (is_patched(value) or is_weight(value))
            if data and not name.startswith("_lt_tiled"):
                found[name] = value
        return found


class ClassData(Place):
    """The attributes of a class that are data.

    Args:
        holder: The class.
        is_data: Whether a value is data.
    """

    def __init__(self, holder: type, is_data: Callable[[Any], bool]) -> None:
        self._is_data = is_data
        super().__init__(holder.__name__, holder)

    def _quick_dictionary(self) -> Mapping[Any, Any]:
        attributes: Mapping[str, Any] = vars(self.holder)
        return attributes

    def read(self) -> dict[str, Any]:
        found = vars(self.holder).items()
        return {name: value for name, value in found if not name.startswith("__") and self._is_data(value)}

    def set(self, name: str, value: Any) -> None:
        setattr(self.holder, name, value)

    def remove(self, name: str) -> None:
        delattr(self.holder, name)


class Globals(Place):
    """The globals of some names."""

    quick = False

    def __init__(self, holder: dict[str, Any], names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(holder.get("__name__", ""), holder)

    def read(self) -> dict[str, Any]:
        return {name: self.holder[name] for name in self.names if name in self.holder}


class Slots(Place):
    """The attributes of an object without a dictionary."""

    def read(self) -> dict[str, Any]:
        slots = [getattr(cls, "__slots__", ()) for cls in type(self.holder).__mro__]
        names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
        return {name: getattr(self.holder, name) for name in names if hasattr(self.holder, name)}

    def set(self, name: str, value: Any) -> None:
        object.__setattr__(self.holder, name, value)

    def remove(self, name: str) -> None:
        object.__delattr__(self.holder, name)


class Large(Place):
    """A large list or dictionary, of which only entries that are added at its end are seen."""

    quick = False

    def __init__(self, name: str, holder: Any) -> None:
        self._length = len(holder)
        super().__init__(name, holder)

    def read(self) -> dict[str, Any]:
        is_list = isinstance(self.holder, list)
        return {"": self.holder[self._length :] if is_list else dict(islice(self.holder.items(), self._length, None))}

    def restore(self, values: dict[Any, Any]) -> None:
        if isinstance(self.holder, list):
            self.holder[self._length :] = values[""]
            return
        while len(self.holder) > self._length:
            self.holder.popitem()
        self.holder.update(values[""])


class RequiresGrad(Place):
    """Which of some tensors require a gradient."""

    def read(self) -> dict[int, bool]:
        return {index: tensor.requires_grad for index, tensor in enumerate(self.holder)}

    def set(self, name: int, value: bool) -> None:
        if self.holder[name].is_leaf:
            self.holder[name].requires_grad_(value)


class GeneratorState(Place):
    """The state of a generator of random numbers.

    Args:
        get: Returns the state.
        set: Sets it.
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], object]) -> None:
        self._get, self._set = get, set
        super().__init__("a generator", None)

    def read(self) -> dict[str, Any]:
        return {"state": self._get()}

    def set(self, name: str, value: Any) -> None:
        self._set(value)

    @property
    def drew(self) -> bool:
        """Whether numbers were drawn since."""
        now, before = self._get(), self.recorded["state"]
        return bool(now != before) if isinstance(now, tuple) else not is_equal(now, before)


# Comparing values


def _without_graph(value: Any) -> Any:
    """Return a value without its graph, which would keep the step alive that made it, and through it the one before."""
    if isinstance(value, Tensor) and not is_weight(value) and value.grad_fn is not None:
        with torch.enable_grad():
            return value.detach().requires_grad_().view_as(value)  # no leaf, which would be taken for a weight
    if type(value) is tuple and not ATOMS.issuperset(map(type, value)):  # the state of a generator has 625 numbers
        inside = tuple(map(_without_graph, value))
        return value if all(map(is_, inside, value)) else inside
    return value


def is_weight(value: Any) -> bool:
    """Whether a value is a parameter or a view of one, as FSDP sets for a while."""
    if not isinstance(value, Tensor):
        return False
    return isinstance(value, nn.Parameter) or isinstance(value._base, nn.Parameter)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy, which need not be there."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy"


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is bytes and a == b) or (isinstance(a, Tensor) and same_memory(a, b))


def same_memory(a: Any, b: Any) -> bool:
    """Whether two values are the same view of one storage, as FSDP makes them anew for each pass."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or storage_of(a) is None or storage_of(a) != storage_of(b):
        return False
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def storage_of(tensor: Tensor) -> int | None:
    """Return what tells a tensor's storage from others that are alive, if the tensor is plain."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage()._cdata if plain and tensor.device.type != "meta" else None


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors and NumPy arrays among them, and nan equal to nan."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(x is y or is_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] or is_equal(a[key], b[key]) for key in a)
    if is_array(a):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    try:
        return bool(a == b) or (isinstance(a, float) and a != a and b != b)
    except Exception:  # of the user's own comparison
        return False
