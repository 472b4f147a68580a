"""What code can read that another pass could find changed: observed once per call, restored for the recompute.

NOTE [State between two passes]
A recompute must read what its forward pass read, and leave everything as it is. For tiles and for checkpointed blocks
one object, made before the forward pass, knows what that is:

* Attributes, buffers, submodules and training mode of each module; what containers, plain objects and arguments hold;
  class attributes; the globals and closures that the code of the modules and of their hooks names. They are recorded
  by identity, and the recompute finds what was there. So nothing happens twice: a list to which a block appends has
  one entry more after the forward pass, and no other after the recompute.
* Buffers and plain tensors that change in place. The first call in each training mode copies small ones and shows
  which modules have some; later calls copy those. A torch function mode gives the recompute clones (see NOTE
  [Substitution]), so other threads see no change. Batch norm and ``.data`` change tensors without a new version, so
  the first call compares values.
* Weights and tensors without a copy. They are compared by identity, version and storage, and a recompute that would
  read other values is refused. Weights that FSDP gathered again are in the storage of before, those of ZeRO-3 are told
  by ``ds_id``. Nothing else that an engine changes is excused.
* The generators of Python, of NumPy and of the modules, if a block drew from them.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from lt_tiled.modules.patch import HOOKS, is_patched
from lt_tiled.tiling.recompute import entry, version_of
from lt_tiled.tiling.weights import Substituted

SMALL = 2**20
"""Larger buffers, in bytes, are copied only once a call showed that they change."""
DEPTH = 3
"""How many containers inside of each other are looked into."""
MAX_ENTRIES = 1000
"""Entries of larger containers are not looked into."""

_ENGINES = frozenset(
    (
        "applied_pre_backward_ref_cnt",
        "ds_grads_remaining",
        "ds_inflight_param_registry",
        "ds_recompute_parameters",
        "post_bwd_fn",
        "pre_bwd_fn",
    )
)
"""What ZeRO-3's hooks set on modules between the passes (runtime/zero/parameter_offload.py)."""
_NOT_READ = (frozenset(nn.Module().__dict__) - {"training"}) | _ENGINES
_MERGED = frozenset(("merged", "merged_adapters"))
"""Attributes by which peft and loralib tell that they changed weights through ``.data``, which gives no new version."""
_LIBRARIES = frozenset(("torch", "deepspeed", "lightning", "pytorch_lightning", "accelerate", "lt_tiled", "numpy"))
_LIBRARIES |= sys.stdlib_module_names - {"__main__"}
"""Packages whose own state is not looked into."""
_ATOMS = frozenset((bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size, type))


@dataclass
class History:
    """What earlier calls of the same modules showed."""

    modes: set[tuple[bool, ...]] = field(default_factory=set)
    """The training modes in which buffers were compared by value."""
    versions: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    """Identity and version of each tensor after the last call, by the number of its module and its name."""
    changing: set[int] = field(default_factory=set)
    """The numbers of the modules with a tensor that changed."""


class Place:
    """A container, or the attributes of an object: what was there, by name or index.

    Args:
        name: The name in messages.
        holder: A dictionary, list, deque, set, NumPy array, or a variable of a closure.
    """

    def __init__(self, name: str, holder: Any) -> None:
        self.name, self.holder = name, holder
        self.shared = False
        """Whether code of others finds it too."""
        self.then = self.read()

    def read(self) -> dict[Any, Any]:
        """Return what is there now."""
        if isinstance(self.holder, dict):
            return dict(self.holder.items())  # no lookups: with those ZeRO-3 gathers weights
        if isinstance(self.holder, CellType):
            with suppress(ValueError):  # it is empty
                return {0: self.holder.cell_contents}
            return {}
        return {0: self.holder.tobytes()} if _is_array(self.holder) else dict(enumerate(self.holder))

    def differing(self, values: dict[Any, Any]) -> list[Any]:
        """Return the names at which there is something else than these values."""
        now = self.read()
        if now.keys() == values.keys() and all(map(is_, map(now.get, values), values.values())):
            return []
        both = values.keys() & now.keys()
        return [*(values.keys() ^ now.keys()), *(name for name in both if not _is_same(now[name], values[name]))]

    def put(self, values: dict[Any, Any]) -> None:
        """Let these values be there."""
        names, holder = self.differing(values), self.holder
        if names and isinstance(holder, list | deque | set):
            holder.clear()
            (holder.update if isinstance(holder, set) else holder.extend)(values.values())
        elif names and isinstance(holder, CellType):
            holder.cell_contents = values[0]
        elif names and _is_array(holder):
            holder.flat = type(holder)(holder.shape, holder.dtype, values[0]).flat
        else:
            for name in names:
                self.set(name, values[name]) if name in values else self.remove(name)

    def set(self, name: Any, value: Any) -> None:
        self.holder[name] = value

    def remove(self, name: Any) -> None:
        del self.holder[name]


class Attributes(Place):
    """The attributes of a module that its users set, and its training mode."""

    def read(self) -> dict[str, Any]:
        found = {name: self.holder[name] for name in self.holder.keys() - _NOT_READ}
        for name in [n for n, value in found.items() if n.startswith("_lt_tiled") or is_patched(value)]:
            del found[name]
        return found


class Data(Place):
    """Attributes of a class, or globals of some names, as far as they are data."""

    def __init__(self, holder: Any, names: tuple[str, ...] | None) -> None:
        self.names, self.is_class = names, isinstance(holder, type)
        super().__init__(holder.__name__ if self.is_class else holder.get("__name__", ""), holder)

    def read(self) -> dict[str, Any]:
        space = vars(self.holder) if self.is_class else self.holder
        names = [n for n in space if not n.startswith("__")] if self.names is None else self.names
        return {name: space[name] for name in names if name in space and _is_data(space[name])}

    def set(self, name: str, value: Any) -> None:
        setattr(self.holder, name, value) if self.is_class else super().set(name, value)

    def remove(self, name: str) -> None:
        delattr(self.holder, name) if self.is_class else super().remove(name)


Change = tuple[str, str]
"""What changed, and how."""


@dataclass(eq=False)
class Held:
    """A tensor as it was."""

    name: str
    part: int
    holder: Any
    key: Any
    tensor: Tensor
    version: int
    storage: StorageWeakRef | None
    requires_grad: bool
    is_weight: bool
    copy: Tensor | None = None

    def changed(self) -> Change | None:
        """Return what happened to its values since."""
        if (now := version_of(self.tensor)) != self.version:
            return str(self), f"was changed in place (version {self.version}, now {now})"
        moved = self.storage is not None and _storage(self.tensor) != self.storage.cdata
        return (f"the data of {self}", "was replaced") if moved and not hasattr(self.tensor, "ds_id") else None

    def lost(self, substituted: bool) -> Change | None:
        """Return what happened to it that cannot be restored."""
        if self.is_weight and not (substituted and self.requires_grad):
            there = entry(self.holder, self.key)
            if there is not self.tensor and there is not None and not _same_memory(there, self.tensor):
                return str(self), "was replaced"
        return None if self.copy is not None else self.changed()

    def __str__(self) -> str:
        return f"{self.name} of shape {list(self.tensor.shape)}"


class Observation:
    """What the code of some modules can read, as it is now: see NOTE [State between two passes].

    Args:
        name: The name in messages.
        parts: The modules and their submodules.
        remedy: What helps against a refusal.
        history: What earlier calls showed. Without it no tensor is copied.
        arguments: What the code is given, by name.
        generators: Whether the generators of Python, NumPy and the modules count.
        shared: Whether classes, globals, closures and hooks count.
        substituted: Whether the recompute takes trainable weights from the forward pass, whatever is in their places.
    """

    def __init__(
        self,
        name: str,
        parts: Iterable[nn.Module],
        remedy: str,
        history: History | None = None,
        arguments: Mapping[str, Any] | None = None,
        generators: bool = False,
        shared: bool = True,
        substituted: bool = False,
    ) -> None:
        self.name, self.remedy, self._history, self._substituted = name, remedy, history, substituted
        self._places: list[Place] = []
        self._tensors: list[Held] = []
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._seen: set[Any] = set()
        self._draws, self._shared = generators, shared
        parts = list(parts)
        mode = tuple(part.training for part in parts)
        self._first = history is not None and mode not in history.modes
        if history is not None:
            history.modes.add(mode)
        if generators:
            self._draw_from(random.getstate, random.setstate)
            if (numpy := sys.modules.get("numpy")) is not None:
                self._draw_from(numpy.random.get_state, numpy.random.set_state)
        for index, part in enumerate(parts):
            self._look_at_module(index, part)
        for key, value in (arguments or {}).items():
            self._look_into(f"its argument {key}", value, DEPTH)

    # What is observed

    def _look_at_module(self, index: int, part: nn.Module) -> None:
        kind = type(part).__name__
        for key, weight in part._parameters.items():
            if weight is not None and not is_lazy(weight):
                self._hold(f"{kind}.{key}", index, part._parameters, key, weight, is_weight=True)
        if isinstance(part, torch.jit.ScriptModule):
            return
        self._look_at(Attributes(kind, part.__dict__), DEPTH, index)
        self._places.append(Place(f"{kind}._modules", part._modules))
        self._look_at(Place(kind, part._buffers), 0, index)
        if not self._shared:
            return
        own = len(self._places)
        for place in _read_by_class(type(part)):
            self._look_at_shared(*place)
        for hook in (hook for name in HOOKS[:2] for hook in part.__dict__[name].values()):
            if _is_users(hook):
                self._look_into(f"a hook of {kind}", hook, DEPTH)
        for shared in self._places[own:]:
            shared.shared = True

    def _look_at_shared(self, holder: Any, names: tuple[str, ...] | None) -> None:
        if (key := (id(holder), names)) in self._seen:
            return
        self._seen.add(key)
        is_cell = isinstance(holder, CellType)
        self._look_at(Place("a variable of a closure", holder) if is_cell else Data(holder, names), DEPTH)

    def _look_at(self, place: Place, depth: int, index: int = -1) -> None:
        """Record a place and, to a depth, what is in it; ``index`` is the number of the module that it belongs to."""
        self._places.append(place)
        for key, value in place.then.items() if len(place.then) <= MAX_ENTRIES else ():
            if type(value) in _ATOMS:
                continue
            name = f"{place.name}.{key}" if isinstance(key, str) else place.name
            if isinstance(value, Tensor) and index >= 0 and not is_lazy(value):
                self._hold(name, index, place.holder, key, value, is_weight=False)
            elif depth:
                self._look_into(name, value, depth - 1)

    def _look_into(self, name: str, value: Any, depth: int) -> None:
        """Record what a value holds, if anything."""
        if type(value) in _ATOMS or id(value) in self._seen:
            return
        self._seen.add(id(value))  # it stays alive in its place
        if isinstance(value, torch.Generator):
            self._draw_from(value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._draw_from(value.getstate, value.setstate)
        elif type(value).__module__.startswith("numpy.random"):
            bits = getattr(value, "bit_generator", value)
            self._draw_from(lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif isinstance(value, tuple):
            for one in value if depth else ():
                self._look_into(name, one, depth - 1)
        elif isinstance(value, dict | list | deque | set) or (_is_array(value) and value.nbytes <= SMALL):
            self._look_at(Place(name, value), depth)
        elif isinstance(value, FunctionType):
            for place in _read_by(value) if self._shared else ():
                self._look_at_shared(*place)
        elif isinstance(value, MethodType | functools.partial):
            inside = (value.__func__, value.__self__) if isinstance(value, MethodType) else (value.func, *value.args)
            for one in inside:
                self._look_into(name, one, depth)
        elif _is_object(value):
            self._look_at(Place(name, value.__dict__), depth)

    def _draw_from(self, get: Callable[[], Any], set: Callable[[Any], object]) -> None:
        if self._draws:
            self._generators.append((get, set, get()))

    def _hold(self, name: str, index: int, holder: Any, key: Any, tensor: Tensor, is_weight: bool) -> None:
        version, storage, history = version_of(tensor), _storage(tensor), self._history
        held = Held(name, index, holder, key, tensor, version, None, tensor.requires_grad, is_weight)
        self._tensors.append(held)
        if storage is None:
            return
        held.storage = StorageWeakRef(tensor.untyped_storage())
        if is_weight or history is None or tensor.grad_fn is not None:
            return
        if history.versions.get((index, name), (id(tensor), version)) != (id(tensor), version):
            history.changing.add(index)  # others change it between calls, as DDP broadcasts buffers
        if self._first or index in history.changing or tensor.nbytes <= SMALL:
            held.copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)

    # What changed

    def end_forward(self) -> Observation:
        """Keep what the recompute needs of what the forward pass changed.

        Raises:
            RuntimeError: If a value is lost that the recompute would read.
        """
        self._generators = [drawn for drawn in self._generators if not is_equal(drawn[0](), drawn[2])]
        if (history := self._history) is None:
            return self
        buffers = [held for held in self._tensors if not held.is_weight]
        for held in buffers:
            unseen = self._first and held.copy is not None and not is_equal(held.copy, held.tensor)
            if unseen or held.changed():
                history.changing.add(held.part)
        for held in buffers:
            held.copy = held.copy if held.part in history.changing else None
            if isinstance(there := entry(held.holder, held.key), Tensor):
                history.versions[held.part, held.name] = id(there), version_of(there)
            if held.copy is None and held.changed():
                raise RuntimeError(
                    f"{self.name}: its forward pass changed the buffer {held} in place for the first time, and the"
                    " recompute needs the old values. Buffers of more than 1 MiB are copied only once a call showed"
                    f" that they change. Replace the buffer instead (self.buffer = ...), or {self.remedy}."
                )
        return self

    @property
    def drew(self) -> bool:
        """Whether a generator is no longer in its state."""
        return not all(is_equal(get(), state) for get, _, state in self._generators)

    def changes(self, tensors: bool = True, names: Container[str] | None = None) -> Iterator[Change]:
        """Yield what modules and arguments hold that is not as it was. What was computed anew may be equal.

        Args:
            tensors: Whether tensors count.
            names: Which attributes count; by default all.
        """
        for held in self._tensors if tensors else ():
            same = held.copy is None or held.is_weight or is_equal(held.copy, held.tensor)
            if change := held.lost(False) if same else (str(held), "was changed in place"):
                yield change
        for place in self._places:
            now, attribute = place.read(), place.name.rpartition(".")[2]
            for name in () if place.shared else place.differing(place.then):
                both = name in now and name in place.then
                counts = names is None or name in names or attribute in names
                if counts and not (both and is_equal(now[name], place.then[name])):
                    yield f"{place.name}.{name}" if isinstance(name, str) else place.name, "was changed"

    def check(self, until: str, everything: bool = False) -> None:
        """Refuse to compute with other values than those observed.

        Args:
            until: What is about to read the values again.
            everything: Whether what :meth:`restored` would restore counts too.

        Raises:
            RuntimeError: If a value changed.
        """
        lost = (held.lost(self._substituted) for held in self._tensors)
        merged = self.changes(False, _MERGED)
        if change := next(filter(None, self.changes() if everything else chain(lost, merged)), None):
            raise RuntimeError(
                f"{self.name}: {' '.join(change)} between the forward pass and {until}, which would compute with other values."
                f" Make the change after the backward pass, such as the optimizer's step, or {self.remedy}."
            )

    @contextmanager
    def restored(self, until: str) -> Iterator[None]:
        """Let code find what was observed, and leave everything as it is now.

        Raises:
            RuntimeError: If a weight changed, or a tensor of which there is no copy.
        """
        self.check(until)
        now = self._now()
        copies = ((held, held.copy) for held in self._tensors if held.copy is not None)
        mode = Substituted([(h.tensor, copy.clone().detach().requires_grad_(h.requires_grad)) for h, copy in copies])
        try:
            self._put([place.then for place in self._places], [h.requires_grad for h in self._tensors])
            for _, set, state in self._generators:
                set(state)
            with mode if mode else nullcontext():
                yield
        finally:
            mode.end()
            self._put(*now[:2])
            for (_, set, _), state in zip(self._generators, now[2], strict=True):
                set(state)

    def _now(self) -> tuple[list[dict[Any, Any]], list[bool], list[Any]]:
        flags = [held.tensor.requires_grad for held in self._tensors]
        return [place.read() for place in self._places], flags, [get() for get, _, _ in self._generators]

    def _put(self, values: Sequence[dict[Any, Any]], flags: Sequence[bool]) -> None:
        for place, entries in zip(self._places, values, strict=True):
            place.put(entries)
        for held, flag in zip(self._tensors, flags, strict=True):
            if held.tensor.requires_grad != flag and held.tensor.is_leaf:
                held.tensor.requires_grad_(flag)

    def undo(self) -> None:
        """Put back what was observed, but for what :meth:`check` refuses."""
        self._put([place.then for place in self._places], [held.requires_grad for held in self._tensors])
        for held in self._tensors:
            if held.copy is not None:
                held.tensor.data.copy_(held.copy)


def restored(observation: Observation | None, until: str) -> AbstractContextManager[None]:
    """Return :meth:`Observation.restored`, or nothing to restore."""
    return nullcontext() if observation is None else observation.restored(until)


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Compute again what was observed: nothing inside is observed, because its graph is not used."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def is_recomputing() -> bool:
    """Whether this thread computes inside of :func:`recomputing`."""
    return _recomputing.get()


# What code reads


_reads: WeakKeyDictionary[type, list[tuple[Any, tuple[str, ...] | None]]] = WeakKeyDictionary()


def _read_by_class(cls: type) -> list[tuple[Any, tuple[str, ...] | None]]:
    """Return the classes, globals and variables of closures that the methods of a class may read."""
    if (known := _reads.get(cls)) is not None:
        return known
    found: list[tuple[Any, tuple[str, ...] | None]] = []
    for base in filter(_is_users, cls.__mro__):
        found.append((base, None))
        for value in vars(base).values():
            if isinstance(function := getattr(value, "__func__", getattr(value, "fget", value)), FunctionType):
                found += _read_by(function)
    if not any(isinstance(holder, CellType) for holder, _ in found):  # which may refer to the class
        _reads[cls] = found
    return found


def _read_by(function: FunctionType) -> list[tuple[Any, tuple[str, ...] | None]]:
    """Return the globals and variables of closures that a function, and those of its module that it names, read."""
    found: list[tuple[Any, tuple[str, ...] | None]] = []
    todo, known = [function], {function.__code__}
    while todo:
        function = todo.pop()
        space, names = function.__globals__, _names_in(function.__code__)
        for cell in function.__closure__ or ():
            value = Place("", cell).then.get(0)
            todo += [value] if isinstance(value, FunctionType) and value.__code__ not in known else []
            found += [(cell, None)] if _is_data(value) else []
        for value in [space.get(name) for name in names]:
            if isinstance(value, FunctionType) and value.__globals__ is space and value.__code__ not in known:
                todo.append(value)
            elif isinstance(value, ModuleType) and _is_users(value):
                found.append((vars(value), tuple(name for name in names if _is_data(vars(value).get(name, value)))))
        known.update(one.__code__ for one in todo)
        found.append((space, tuple(name for name in names if _is_data(space.get(name, function)))))
    return [(holder, names) for holder, names in found if names != ()]


@functools.cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    inside = (name for const in code.co_consts if isinstance(const, CodeType) for name in _names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inside)))


def _is_users(value: Any) -> bool:
    """Whether a class, function or module is neither of the standard library nor of the libraries that run models."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name is not None and name.partition(".")[0] not in _LIBRARIES


def _is_object(value: Any) -> bool:
    """Whether a value has attributes that code may read as data."""
    plain = not isinstance(value, type | nn.Module | Tensor | ModuleType | FunctionType)
    return plain and hasattr(value, "__dict__") and (type(value) is SimpleNamespace or _is_users(type(value)))


def _is_data(value: Any) -> bool:
    kinds = (tuple, list, dict, set, deque, Tensor, torch.Generator, random.Random)
    if type(value) in _ATOMS:
        return type(value) is not type
    return isinstance(value, kinds) or _is_array(value) or _is_object(value)


def _is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy"


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is bytes and a == b) or (isinstance(a, Tensor) and _same_memory(a, b))


def _same_memory(a: Any, b: Any) -> bool:
    """Whether two values are the same view of one storage, as FSDP makes them anew for each pass."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or _storage(a) is None or _storage(a) != _storage(b):
        return False
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _storage(tensor: Tensor) -> int | None:
    """Return what tells a tensor's storage from others that are alive, if the tensor is plain."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage()._cdata if plain and tensor.device.type != "meta" else None


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors and NumPy arrays among them, and nan equal to nan."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and bool(torch.equal(a.detach(), b.detach()))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(x is y or is_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] or is_equal(a[key], b[key]) for key in a)
    if _is_array(a):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)
