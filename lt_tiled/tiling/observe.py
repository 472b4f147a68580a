"""Record what a forward pass reads, and restore it for the recompute.

NOTE [State between two passes]
A recompute must read what its forward pass read, and leave everything as it is. For tiles and for checkpointed blocks
one object, made before the forward pass, knows what that is:

* Attributes, buffers, submodules and training mode of each module; what containers, plain objects and arguments hold;
  class attributes; the globals and closures that the code of the modules and of their hooks names. They are recorded
  by identity, and the recompute finds what was there. So nothing happens twice: a list to which a block appends has
  one entry more after the forward pass, and no other after the recompute.
* Buffers and plain tensors that change in place. The first call in each training mode copies all of them and shows
  which modules have some; later calls copy those, and small ones until the forward pass ends. A torch function mode
  gives the recompute clones (see NOTE [Substitution]), so other threads see no change. Batch norm and ``.data`` change
  tensors without a new version, so the first call compares values.
* Weights and tensors without a copy. They are compared by identity, version and storage, and a recompute that would
  read other values is refused. Weights that FSDP2 gathered again are in the storage of before. Those of FSDP and ZeRO-3
  may be elsewhere and have the engine's mark. ZeRO-3's own attributes of modules are
  ignored. All other changes by an engine are refused.
* The generators of Python, of NumPy and of the modules, if a block drew from them.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from lt_tiled.modules.patch import HOOKS
from lt_tiled.tiling.places import (
    ATOMS,
    Attributes,
    Data,
    GeneratorState,
    Large,
    Place,
    RequiresGrad,
    ScriptedMode,
    Slots,
    is_array,
    is_equal,
    is_object,
    is_users,
    is_weight,
    read_by,
    read_by_class,
    same_memory,
    storage_of,
)
from lt_tiled.tiling.recompute import entry, version_of
from lt_tiled.tiling.weights import Substituted

SMALL = 2**20
"""Larger buffers, in bytes, are copied only in a first call, and once a call showed that they change."""
DEPTH = 6
"""How many containers inside of each other are looked into."""
MAX_ENTRIES = 1000
"""Entries of larger containers are not looked into."""


@dataclass
class History:
    """What earlier calls of the same modules showed."""

    modes: set[tuple[bool, ...]] = field(default_factory=set)
    """The training modes in which buffers were compared by value."""
    versions: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    """Identity and version of each tensor after the last call, by the number of its module and its name."""
    changing: set[int] = field(default_factory=set)
    """The numbers of the modules with a tensor that changed."""


_SHARDED = (
    "was sharded again (what modules compute beside their output, such as a loss that a list collects, has its backward"
    " pass before FSDP gathers their weights: return it)"
)
Change = tuple[str, str]
"""What changed, and how."""


@dataclass(eq=False)
class TensorRecord:
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
        moved = self.storage is not None and storage_of(self.tensor) != self.storage.cdata
        engines = hasattr(self.tensor, "ds_id") or hasattr(self.tensor, "_fsdp_flattened")
        return (f"the data of {self}", "was replaced") if moved and not engines else None

    def lost(self, substituted: bool) -> Change | None:
        """Return what happened to it that cannot be restored."""
        if self.is_weight and not (substituted and self.requires_grad):
            there = entry(self.holder, self.key)
            if there is not self.tensor and there is not None and not same_memory(there, self.tensor):
                was, sharded = (type(t).__name__ == "DTensor" for t in (self.tensor, there))
                if was == sharded:
                    return str(self), "was replaced"
                return (str(self), _SHARDED) if sharded else None  # FSDP2 gathers units inside of a block by themselves
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
        self._tensors: list[TensorRecord] = []
        self._generators: list[GeneratorState] = []
        self._seen: set[Any] = set()
        self._draws, self._shared = generators, shared
        parts = list(parts)
        self._mode = tuple(part.training for part in parts)
        self._first = history is not None and self._mode not in history.modes
        self._look_at_all(parts, arguments or {})
        self._places.append(RequiresGrad("requires_grad of a weight", tuple(record.tensor for record in self._tensors)))
        self._seen.clear()

    # What is observed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look_at_all(self, parts: Sequence[nn.Module], arguments: Mapping[str, Any]) -> None:
        self._draw_from(random.getstate, random.setstate)
        if (numpy := sys.modules.get("numpy")) is not None:
            self._draw_from(functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state)
        for index, part in enumerate(parts):
            self._look_at_module(index, part)
        for key, value in arguments.items():
            self._look_into(f"its argument {key}", value, DEPTH)

    def _look_at_module(self, index: int, part: nn.Module) -> None:
        kind = type(part).__name__
        weights: list[tuple[Any, str, Tensor]]
        weights = [(part._parameters, key, t) for key, t in part._parameters.items() if t is not None]
        weights += [(part.__dict__, key, value) for key, value in part.__dict__.items() if isinstance(value, Tensor)]
        for place, key, weight in weights:
            if not is_lazy(weight) and (place is part._parameters or is_weight(weight)):
                self._hold(f"{kind}.{key}", index, place, key, weight, is_weight=True)
        if isinstance(part, torch.jit.ScriptModule):
            self._places.append(ScriptedMode(kind, part))
            return
        self._look_at(Attributes(kind, part.__dict__), DEPTH, index)
        self._look_at(Place(kind, part._buffers), 0, index)
        if part._modules:
            self._look_at(Place(f"{kind}._modules", part._modules), 0, index)
        if not self._shared:
            return
        for source in read_by_class(type(part)):
            self._look_at_shared(*source)
        for hook in (hook for name in HOOKS[:2] for hook in part.__dict__[name].values()):
            if is_users(getattr(hook, "func", hook)):
                self._look_into(f"a hook of {kind}", hook, DEPTH)

    def _look_at_shared(self, holder: Any, names: tuple[str, ...]) -> None:
        if (key := (id(holder), names)) in self._seen:
            return
        self._seen.add(key)
        is_cell = isinstance(holder, CellType)
        self._look_at(Place("a variable of a closure", holder) if is_cell else Data(holder, names), DEPTH)

    def _look_at(self, place: Place, depth: int, index: int = -1) -> None:
        """Record a place and, to a depth, what is in it; ``index`` is the number of the module that it belongs to."""
        self._places.append(place)
        for key, value in place.recorded.items():
            if type(value) in ATOMS:
                continue
            name = f"{place.name}.{key}" if isinstance(key, str) else place.name
            if isinstance(value, Tensor) and index >= 0 and not is_lazy(value):
                self._hold(name, index, place.holder, key, value, is_weight=False)
            elif depth:
                with suppress(Exception):  # of what users' own classes do where they are asked for their attributes
                    self._look_into(name, value, depth - 1)

    def _look_into(self, name: str, value: Any, depth: int) -> None:
        """Record what a value holds, if anything."""
        if type(value) in ATOMS or id(value) in self._seen:
            return
        self._seen.add(id(value))  # it stays alive in its place
        if isinstance(value, torch.Generator):
            self._draw_from(value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._draw_from(value.getstate, value.setstate)
        elif type(value).__name__ == "RandomState" and type(value).__module__.startswith("numpy.random"):
            self._draw_from(functools.partial(value.get_state, legacy=False), value.set_state)
        elif type(value).__module__.startswith("numpy.random"):
            bits = getattr(value, "bit_generator", value)
            self._draw_from(lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif isinstance(value, tuple):
            for one in value if depth else ():
                self._look_into(name, one, depth - 1)
        elif isinstance(value, dict | list | deque | set) or (
            is_array(value) and not value.dtype.hasobject and value.nbytes <= SMALL
        ):
            if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
                self._places.append(Large(name, value))
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

    def _draw_from(self, get: Callable[[], Any], set: Callable[[Any], object]) -> None:
        if self._draws:
            self._generators.append(GeneratorState(get, set))

    def _hold(self, name: str, index: int, holder: Any, key: Any, tensor: Tensor, is_weight: bool) -> None:
        version, storage, history = version_of(tensor), storage_of(tensor), self._history
        record = TensorRecord(name, index, holder, key, tensor, version, None, tensor.requires_grad, is_weight)
        self._tensors.append(record)
        if storage is None:
            return
        record.storage = StorageWeakRef(tensor.untyped_storage())
        if is_weight or history is None or tensor.grad_fn is not None:
            return
        if history.versions.get((index, name), (id(tensor), version)) != (id(tensor), version):
            history.changing.add(index)  # others change it between calls, as DDP broadcasts buffers
        if (self._first and self._shared) or index in history.changing or tensor.nbytes <= SMALL:
            record.copy = tensor.detach().clone()

    # What changed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_forward(self) -> Observation:
        """Keep what the recompute needs of what the forward pass changed.

        Raises:
            RuntimeError: If a value is lost that the recompute would read.
        """
        self._places += [generator for generator in self._generators if generator.drew]
        if (history := self._history) is None:
            return self
        history.modes.add(self._mode)
        buffers = [record for record in self._tensors if not record.is_weight]
        for record in buffers:
            unseen = self._first and record.copy is not None and not is_equal(record.copy, record.tensor)
            if unseen or record.changed():
                history.changing.add(record.part)
        for record in buffers:
            record.copy = record.copy if record.part in history.changing else None
            if isinstance(there := entry(record.holder, record.key), Tensor):
                history.versions[record.part, record.name] = id(there), version_of(there)
            if record.copy is None and record.changed():
                raise RuntimeError(
                    f"{self.name}: its forward pass changed the buffer {record} in place for the first time, and the"
                    " recompute needs the old values. Buffers of more than 1 MiB are copied only once a call showed"
                    f" that they change. Replace the buffer instead (self.buffer = ...), or {self.remedy}."
                )
        return self

    @property
    def drew(self) -> bool:
        """Whether a generator is no longer in its state."""
        return any(generator.drew for generator in self._generators)

    def changes(self, attributes: bool = True) -> Iterator[Change]:
        """Yield the tensors, and the attributes, that are not as they were. What was computed anew may be equal."""
        for record in self._tensors:
            same = record.copy is None or record.is_weight or is_equal(record.copy, record.tensor)
            if change := record.lost(False) if same else (str(record), "was changed in place"):
                yield change
        for place in self._places if attributes else ():
            now = place.read()
            for name in place.differing(place.recorded, now):
                both = name in now and name in place.recorded
                if not (both and is_equal(now[name], place.recorded[name])):
                    yield f"{place.name}.{name}" if isinstance(name, str) else place.name, "was changed"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(self, until: str) -> None:
        """Refuse to compute with other values than those observed, unless :meth:`restored` restores them.

        Args:
            until: What is about to read the values again.

        Raises:
            RuntimeError: If a value changed.
        """
        lost = (record.lost(self._substituted) for record in self._tensors)
        if change := next(filter(None, lost), None):
            raise RuntimeError(
                f"{self.name}: {' '.join(change)} between the forward pass and {until}, which would"
                f" compute with other values. Make the change after the backward pass, such as the optimizer's step, or"
                f" {self.remedy}."
            )

    @contextmanager
    def restored(self, until: str) -> Iterator[None]:
        """Let code find what was observed, and leave everything as it is now.

        Raises:
            RuntimeError: If a weight changed, or a tensor of which there is no copy.
        """
        self.check(until)
        copies = ((record, record.copy) for record in self._tensors if record.copy is not None)
        mode = Substituted([(r.tensor, copy.clone().requires_grad_(r.requires_grad)) for r, copy in copies])
        with ExitStack() as after:
            self._restore(after)
            after.callback(mode.end)
            with mode if mode else nullcontext():
                yield

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _restore(self, after: ExitStack) -> None:
        """Restore what was observed, and add to ``after`` what puts back what is there now."""
        before = [(place, place.read()) for place in self._places]
        for place, now in before:
            after.callback(place.restore, now)
        for place, now in before:
            if now.keys() != place.recorded.keys() or not all(map(is_, now.values(), place.recorded.values())):
                place.restore(place.recorded, now)

    def undo(self) -> None:
        """Put back what was observed, generators among it, but for what :meth:`check` refuses."""
        for place in (*self._places, *self._generators):
            place.restore(place.recorded)
        for record in self._tensors:
            if record.copy is not None and record.copy.shape == record.tensor.shape:
                record.tensor.data.copy_(record.copy)


def restored(observation: Observation | None, until: str) -> AbstractContextManager[None]:
    """Return :meth:`Observation.restored`, or nothing to restore."""
    return nullcontext() if observation is None else observation.restored(until)


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Compute again what was observed: tiled calls inside are not observed, because their graph is not used."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def is_recomputing() -> bool:
    """Whether this thread computes inside of :func:`recomputing`."""
    return _recomputing.get()
