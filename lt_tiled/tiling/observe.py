"""Record what a forward pass reads, and restore it for the recompute.

NOTE [State between two passes]
A recompute must read what its forward pass read, and leave everything as it is. For tiles and for checkpointed blocks
one object, made before the forward pass, knows what that is:

* Attributes, buffers, submodules, hooks and training mode of each module; what containers, plain objects and arguments
  hold; class attributes; the globals and closures that the code of the modules and of their hooks names. They are
  recorded by identity and restored for the recompute, for all threads while it runs, so side effects happen once: a
  list that a block appends to grows by one entry per forward pass, not again in the recompute.
* Buffers and other plain tensors that change in place. The first call in each training mode copies all buffers, and
  others of up to 64 MiB, and shows which change; later calls copy those, and small ones until the forward pass ends. A
  torch function mode gives the recompute clones, so other threads see no change. Batch norm
  and ``.data`` change tensors without a new version, so the first call compares values.
* Weights and tensors without a copy. A weight that was replaced, as by ``torch.func.functional_call``, is put back for
  the recompute. All of them are compared by version and storage, and a recompute that would read other values is
  refused. Weights that FSDP2 gathered again are in the storage of before. Those of FSDP and ZeRO-3 may be elsewhere and
  are recognized by the attribute that the engine sets (``ds_id``, ``_fsdp_flattened``). ZeRO-3's own attributes of
  modules are ignored. All other changes by an engine are refused.
* The generators of Python, of NumPy and of the modules, if a block drew from them.

Finding all this takes longer than seeing that nothing changed. So what a call found (``Reachable``) serves the next
one if every place in it still holds the same objects, and it holds no tensor that a step made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lt_tiled.tiling.places import GeneratorState, changed, is_equal, same_memory, storage_of
from lt_tiled.tiling.reach import SMALL, HeldTensor, Reachable, global_generators
from lt_tiled.tiling.recompute import Substituted, version_of


@dataclass
class History:
    """What earlier calls of the same modules showed."""

    reachable: Reachable | None = None
    """What the last call could read."""
    modes: set[tuple[bool, ...]] = field(default_factory=set)
    """The training modes in which buffers were compared by value."""
    versions: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    """Identity and version of each tensor after the last call, by the number of its module and its name."""
    changing: set[int] = field(default_factory=set)
    """The numbers of the modules with a tensor that changed."""
    touched: set[tuple[int, str]] = field(default_factory=set)
    """The weights whose version the forward pass raises, by the number of their module and their name."""


_SHARDED = (
    "was sharded again by FSDP (where a module keeps a loss in a list, its backward pass comes before the weights are"
    " gathered: return the loss as an output)"
)
Change = tuple[str, str]
"""What changed, and how."""
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


def _sums(weight: Tensor) -> Tensor | None:
    """Return sums, in float64, that show whether the values changed; ``None`` while ZeRO-3 has them elsewhere.

    The first shows values that are larger or smaller, the others values that are at other places.
    """
    if weight.numel() == 0:
        return None
    values = weight.detach()  # else torch's checkpoint would see what the sums save
    sums = [torch.linalg.vector_norm(values, dtype=torch.float64)]
    for rows in (values.reshape(len(values), -1), values.reshape(-1, values.shape[-1]).T):
        places = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=values.device)
        sums.append(rows.sum(1, dtype=torch.float64) @ places)
    return torch.stack(sums)


def _without_function_modes(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run past torch function modes, which give other tensors to what is computed again."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


class Observation:
    """What the code of some modules can read, as it is now: see NOTE [State between two passes].

    Args:
        name: The name in messages.
        modules: The modules.
        remedy: What helps against a refusal.
        history: What earlier calls of these modules showed. Without it no tensor is copied.
        arguments: What the code is given, by name.
        generators: Whether the generators of Python, NumPy and the modules count.
        shared: Whether classes, globals, closures and hooks count.
        substituted: Whether the recompute takes trainable weights from the forward pass, whatever is in their places.
        submodules: Whether the submodules of the modules count.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        remedy: str,
        history: History | None = None,
        arguments: Mapping[str, Any] | None = None,
        generators: bool = False,
        shared: bool = True,
        substituted: bool = False,
        submodules: bool = True,
    ) -> None:
        self.name, self.remedy, self._history, self._substituted = name, remedy, history, substituted
        self._storages: set[int] | None = None
        self._copies: dict[int, Tensor] = {}
        """Values of tensors that may change in place, by their index."""
        self._sums: dict[int, Tensor | None] = {}
        """Sums of the weights whose version the forward pass raises, by their index."""
        self._look(modules, arguments or {}, generators, shared, submodules)

    @_without_function_modes
    def _look(
        self,
        modules: Sequence[nn.Module],
        arguments: Mapping[str, Any],
        generators: bool,
        shared: bool,
        submodules: bool,
    ) -> None:
        history = self._history
        reachable = None if history is None else history.reachable
        if reachable is None or not reachable.is_current(modules):
            reachable = Reachable(modules, {}, shared, submodules)
        if history is not None:
            history.reachable = reachable if reachable.lasts else None
        given = Reachable((), arguments, shared)
        self._mode, self._tensors = reachable.mode, [*reachable.tensors, *given.tensors]
        self._places = [*reachable.places, *given.places]
        found = [*global_generators(), *reachable.generators, *given.generators] if generators else []
        self._generators = [GeneratorState(get, set) for get, set in found]
        self._versions = [version_of(held.tensor) for held in self._tensors]
        if history is not None:
            self._copy(history, shared)
            for index, held in enumerate(self._tensors):
                if (held.part, held.name) in history.touched:
                    self._sums[index] = _sums(held.tensor)

    def _copy(self, history: History, shared: bool) -> None:
        """Copy what may change in place: what changed before, what is small, and everything in the first call."""
        first = shared and self._mode not in history.modes
        for index, held in self._buffers():
            now = id(held.tensor), self._versions[index]
            if held.storage is None or held.has_graph:
                continue
            if history.versions.get((held.part, held.name), now) != now:
                history.changing.add(held.part)  # others change it between calls, as DDP broadcasts buffers
            largest: float = SMALL
            if first:
                largest = math.inf if held.part >= 0 else 64 * SMALL  # a global may be a data set
            if held.part in history.changing or held.tensor.nbytes <= largest:
                self._copies[index] = held.tensor.detach().clone()

    def _buffers(self) -> list[tuple[int, HeldTensor]]:
        return [(index, held) for index, held in enumerate(self._tensors) if not held.is_weight]

    # What changed

    @_without_function_modes
    def end_forward(self) -> None:
        """Keep what the recompute needs of what the forward pass changed.

        Raises:
            RuntimeError: If a value is lost that the recompute would read.
        """
        self._places += [generator for generator in self._generators if generator.drew]
        if (history := self._history) is None:
            return
        first, buffers = self._mode not in history.modes, self._buffers()
        history.modes.add(self._mode)
        for index, held in enumerate(self._tensors):
            # As peft does, which gives a weight a parametrization in each forward pass. In the first call the sums come
            # too late, and a forward pass that changed the values is noticed by what its recompute computes.
            if held.is_weight and version_of(held.tensor) != self._versions[index]:
                history.touched.add((held.part, held.name))
                self._sums.setdefault(index, _sums(held.tensor))
        for index, held in buffers:
            unseen = first and index in self._copies and not is_equal(self._copies[index], held.tensor)
            if unseen or self._changed(index):
                history.changing.add(held.part)
        for index, held in buffers:
            if held.part not in history.changing:
                self._copies.pop(index, None)
            there = held.holder.get(held.key) if held.part >= 0 else held.tensor
            if isinstance(there, Tensor):
                history.versions[held.part, held.name] = id(there), version_of(there)
            if index not in self._copies and self._changed(index):
                raise RuntimeError(
                    f"{self.name}: its forward pass changed the buffer {held} in place for the first time, and the"
                    " recompute needs the old values. Buffers of more than 1 MiB are copied only once a call showed"
                    f" that they change. Replace the buffer instead (self.buffer = ...), or {self.remedy}."
                )

    @property
    def has_copies(self) -> bool:
        """Whether the forward pass changed tensors in place."""
        return bool(self._copies)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a plain tensor is one of those observed, or a view of one, so that it needs no sample."""
        if self._storages is None:
            self._storages = {held.storage.cdata for held in self._tensors if held.storage is not None}
        return tensor.untyped_storage()._cdata in self._storages

    @_without_function_modes
    def changes(self, attributes: bool = True, by_value: bool = True) -> list[Change]:
        """Return what is not as it was.

        Args:
            attributes: Whether what is no tensor counts. What was computed anew may be equal.
            by_value: Compare values with copies, which waits for the device: ``.data`` changes tensors unseen.
        """
        found: list[Change] = []
        for index, held in enumerate(self._tensors):
            change = self._changed(index) if index in self._copies else self._lost(index, False)
            if by_value and index in self._copies:
                equal = is_equal(self._copies[index], held.tensor)
                change = None if equal else (str(held), "was changed in place")
            if change is not None:
                found.append(change)
        for place in changed(self._places) if attributes else ():
            now = place.read()
            for name in place.differing(place.recorded):
                both = name in now and name in place.recorded
                if not (both and is_equal(now[name], place.recorded[name])):
                    found.append((f"{place.name}.{name}" if isinstance(name, str) else place.name, "was changed"))
        return found

    def _changed(self, index: int) -> Change | None:
        """Return what happened to the values of a tensor since."""
        held, version = self._tensors[index], self._versions[index]
        if (now := version_of(held.tensor)) != version:
            if index in self._sums and self._has_same_sums(index):
                return None
            return str(held), f"was changed in place (version {version}, now {now})"
        moved = held.storage is not None and storage_of(held.tensor) != held.storage.cdata
        engines = hasattr(held.tensor, "ds_id") or hasattr(held.tensor, "_fsdp_flattened")
        return (f"the data of {held}", "was replaced") if moved and not engines else None

    def _has_same_sums(self, index: int) -> bool:
        """Whether a weight has the values of before, or it cannot be known here and is left to the comparison."""
        before, now = self._sums[index], _sums(self._tensors[index].tensor)
        return before is None or now is None or torch.allclose(before, now, rtol=1e-12, atol=0.0, equal_nan=True)

    def _lost(self, index: int, substituted: bool) -> Change | None:
        """Return what happened to a tensor that cannot be restored."""
        held = self._tensors[index]
        if held.is_weight and not (substituted and held.requires_grad):
            there = held.holder.get(held.key)  # held.holder[held.key] would all-gather it under ZeRO-3
            if there is not held.tensor and there is not None and not same_memory(there, held.tensor):
                was, sharded = (type(tensor).__name__ == "DTensor" for tensor in (held.tensor, there))
                if was == sharded:
                    return str(held), "was replaced"
                return (str(held), _SHARDED) if sharded else None  # FSDP2 gathers units inside of a block by themselves
        return None if index in self._copies else self._changed(index)

    @_without_function_modes
    def check(self, until: str) -> list[HeldTensor]:
        """Refuse to compute with other values than those observed, unless :meth:`restored` restores them.

        Args:
            until: What is about to read the values again.

        Returns:
            The weights that were replaced since, as by ``torch.func.functional_call``.

        Raises:
            RuntimeError: If a value changed.
        """
        replaced = []
        for index, held in enumerate(self._tensors):
            if change := self._lost(index, self._substituted):
                if held.is_kept and self._changed(index) is None:
                    replaced.append(held)
                    continue
                raise RuntimeError(
                    f"{self.name}: {' '.join(change)} between the forward pass and {until}, which would"
                    f" compute with other values. Make the change after the backward pass, such as the optimizer's"
                    f" step, or {self.remedy}."
                )
        return replaced

    @contextmanager
    def restored(self, until: str) -> Iterator[None]:
        """Let code find what was observed, and leave everything as it is now.

        Raises:
            RuntimeError: If a weight changed, or a tensor of which there is no copy.
        """
        replaced = self.check(until)
        copies = [(self._tensors[index], copy) for index, copy in self._copies.items()]
        mode = Substituted([(held.tensor, copy.clone().requires_grad_(held.requires_grad)) for held, copy in copies])
        with ExitStack() as after:
            self._restore(after, replaced)
            after.callback(mode.end)
            with mode if mode else nullcontext():
                yield

    @_without_function_modes
    def _restore(self, after: ExitStack, replaced: Sequence[HeldTensor]) -> None:
        """Restore what was observed, and add to ``after`` what puts back what is there now."""
        for held in replaced:
            after.callback(held.holder.__setitem__, held.key, held.holder.get(held.key))
            held.holder[held.key] = held.tensor
        differs = {*changed(self._places), *(place for place in self._places if place.has_graphs)}
        before = {place: place.read() for place in differs}

        @after.callback
        def put_back() -> None:
            with ExitStack() as all_of_them:
                for place in {**before, **dict.fromkeys(changed(self._places))}:
                    all_of_them.callback(place.restore, before.get(place, place.recorded))

        for place in before:
            place.restore(place.recorded)

    def undo(self) -> None:
        """Put back what was observed, generators among it, but for what :meth:`check` refuses."""
        for place in (*self._places, *self._generators):
            place.restore(place.recorded)
        for index, copy in self._copies.items():
            tensor = self._tensors[index].tensor
            if copy.shape == tensor.shape:
                tensor.data.copy_(copy)


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
