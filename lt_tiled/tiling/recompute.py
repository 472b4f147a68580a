"""What a recompute must find as the forward pass found it: random generators, autocast, and what the modules hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from lt_tiled.modules.patch import Patch, get_patches, place_of


@dataclass(frozen=True)
class RandomState:
    """The states of the random generators that a module on ``device`` draws from."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the current states."""
        accelerator = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), accelerator)

    def set(self) -> None:
        """Make them the current states."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    def same_as(self, other: RandomState) -> bool:
        """Whether both would give the same random numbers."""
        with _disable_current_modes():  # states are real tensors, also where a model runs on fake ones
            pairs = ((self.cpu, other.cpu), (self.accelerator, other.accelerator))
            return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@contextmanager
def random_state_kept(device: torch.device, start: RandomState | None = None) -> Iterator[None]:
    """Restore the generators at the end; inside, let them begin at ``start``."""
    before = RandomState.now(device)
    try:
        if start is not None:
            start.set()
        yield
    finally:
        before.set()


def hidden_from_modes(tensor: Tensor) -> AbstractContextManager[object]:
    """Hide what runs from FlopCounterMode and other modes, unless it runs on fake tensors."""
    return _disable_current_modes() if type(tensor) in (Tensor, nn.Parameter) else nullcontext()


@contextmanager
def training_set(modes: Iterable[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the training mode of modules for a while, without ``train()`` and ``eval()``, which modules override."""
    both = [(part, part.training, mode) for part, mode in modes]
    try:
        for part, before, mode in both:
            if before != mode:
                part.training = mode
        yield
    finally:  # all of them: a recompute may stop where the module's own code has changed its mode for a while
        for part, before, _ in both:
            if part.training != before:
                part.training = before


@dataclass(frozen=True)
class AutocastState:
    """The settings of ``torch.autocast``; ``None`` on devices without it."""

    settings: tuple[str, bool, torch.dtype, bool] | None

    @classmethod
    def now(cls, device: torch.device) -> AutocastState:
        """Return the current settings."""
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(None)
        enabled, cache = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        return cls((kind, enabled, torch.get_autocast_dtype(kind), cache))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast where it is enabled."""
        return self.settings[2] if self.settings is not None and self.settings[1] else None

    def context(self) -> AbstractContextManager[object]:
        """Apply these settings."""
        if self.settings is None:
            return nullcontext()
        kind, enabled, dtype, cache = self.settings
        return torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)

    def disabled(self) -> AbstractContextManager[object]:
        """Disable autocast inside of these settings, if they enable it."""
        return nullcontext() if self.dtype is None else torch.autocast(self.settings[0], enabled=False)  # type: ignore[index]


class SavedCounter(torch.autograd.graph.saved_tensors_hooks):
    """Counts the saved tensors of a graph. As the innermost pair of hooks it also hides a tile from an offloader."""

    def __init__(self) -> None:
        self.count = 0

        def pack(tensor: Tensor) -> Tensor:
            self.count += 1
            # An output that its own node holds through a hook would keep the node alive if no backward pass runs.
            return tensor if tensor.is_leaf else tensor.detach()

        super().__init__(pack, lambda packed: packed)

    def innermost(self) -> bool:
        """Whether no other pair of hooks was entered since, which would save tensors uncounted."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] is self.pack_hook


def saves_elsewhere() -> bool:
    """Whether hooks would see the saved tensors of a graph that is made now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"_modules"}
"""Attributes of every module: its tensors are compared one by one, and hooks run in the recompute as they are then."""


def entry(holder: Any, name: str) -> Any:
    """Return what a module holds under a name, or ``None``. ``holder[name]`` would all-gather it under ZeRO-3."""
    try:
        return holder.get(name)
    except AttributeError:  # of a ScriptModule
        return dict(holder.items()).get(name)


class TensorState(NamedTuple):
    """A tensor of a module as a forward pass saw it."""

    part: nn.Module
    name: str
    holder: dict[str, Any]
    tensor: Tensor
    version: int
    pointer: int
    substituted: bool
    """Whether the recompute takes this tensor, whatever is in its place."""

    @classmethod
    def now(cls, part: nn.Module, name: str, holder: Any, tensor: Tensor, substituted: bool) -> TensorState:
        """Return the tensor as it is."""
        return cls(part, name, holder, tensor, version_of(tensor), _pointer(tensor), substituted)

    def change(self, moved: bool) -> str | None:
        """Return what happened to it since; see :class:`ModuleState` for ``moved``."""
        there, tensor = entry(self.holder, self.name), self.tensor
        if there is not tensor and not self.substituted:
            computed = self.holder is self.part.__dict__ and equal(there, tensor)
            return None if moved or computed else f"{self} was replaced"
        if version_of(tensor) != self.version:
            return f"{self} was changed in place (version {self.version}, now {version_of(tensor)})"
        return None if moved or _pointer(tensor) == self.pointer else f"the data of {self} was replaced"

    def __str__(self) -> str:
        return f"{type(self.part).__name__}.{self.name} of shape {list(self.tensor.shape)}"


class ModuleState:
    """The tensors and plain attributes (numbers, text, containers, submodules) of modules as a forward pass saw them.

    Args:
        parts: The modules and their submodules.
        moved: Whether the engine frees weights and all-gathers them again, in other memory or as other tensors.
        own: Names of attributes that the engine changes.
        held: Which of a module's dictionaries are compared.
        substituted: Whether the recompute takes trainable tensors from the forward pass.
        changing: Names of attributes that a module changes itself.
    """

    def __init__(
        self,
        parts: Iterable[nn.Module],
        moved: bool,
        own: frozenset[str] = frozenset(),
        held: Sequence[str] = ("_parameters", "_buffers", "__dict__"),
        substituted: bool = True,
        changing: Mapping[nn.Module, set[str]] = MappingProxyType({}),
    ) -> None:
        self._moved = moved
        self._tensors: list[TensorState] = []
        self._attributes: list[tuple[nn.Module, frozenset[str], dict[str, tuple[Any, Any]]]] = []
        for part in parts:
            patches = get_patches(part, Patch)  # which may be removed meanwhile
            places = ((place_of(type(patch), patch.method), patch.method) for patch in patches)
            ignored = MODULE_ATTRIBUTES.union(own, changing.get(part, ()), *places)
            for holder in (getattr(part, name) for name in held):
                self._tensors += [
                    TensorState.now(part, name, holder, t, substituted and t.requires_grad)
                    for name, t in holder.items()
                    if isinstance(t, Tensor) and not is_lazy(t) and name not in ignored
                ]
            if "__dict__" in held:
                self._attributes.append((part, ignored, {n: (v, snapshot(v)) for n, v in _plain(part, ignored)}))

    def check(self, module: str, until: str, remedy: str = "lt_tiled.untile() the module") -> None:
        """Refuse to compute with other values than the forward pass.

        Args:
            module: The name in messages.
            until: What is about to read the values again.
            remedy: What else helps.

        Raises:
            RuntimeError: If a tensor was changed or replaced, or an attribute has another value.
        """
        changes = chain((seen.change(self._moved) for seen in self._tensors), self._attribute_changes())
        if found := next(filter(None, changes), None):
            raise changed_between(module, found, until, remedy)

    def _attribute_changes(self) -> Iterator[str]:
        for part, ignored, then in self._attributes:
            now = dict(_plain(part, ignored))
            for name in then.keys() | now.keys():
                if name not in now or name not in then or not is_unchanged(now[name], *then[name], may_grow=True):
                    yield f"{type(part).__name__}.{name} was changed"


def changed_between(module: str, change: str, until: str, remedy: str) -> RuntimeError:
    """Return the error for a change between a forward pass and what reads the same values again."""
    return RuntimeError(
        f"{module}: {change} between the forward pass and {until}, which would compute with other values. Make the"
        f" change after the backward pass, such as the optimizer's step, or {remedy}."
    )


def _plain(part: nn.Module, ignored: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, value in part.__dict__.items():
        if name not in ignored and not isinstance(value, Tensor):
            yield name, value


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


SMALL_BUFFER = 2**20
"""Buffers of more bytes are not copied at each call."""


def _pointer(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain and tensor.device.type != "meta" else 0


_kinds: dict[type, str] = {}  # no functools.cache, of which torch.compile warns


def _kind(cls: type) -> str:
    if cls not in _kinds:
        _kinds[cls] = _find_kind(cls)
    return _kinds[cls]


def _find_kind(cls: type) -> str:
    kinds: dict[str, Any] = {"tensor": Tensor, "dict": dict, "sequence": (list, tuple, set, deque)}
    if found := next((name for name, kind in kinds.items() if issubclass(cls, kind)), ""):
        return found
    if any((base.__module__, base.__name__) == ("numpy", "ndarray") for base in cls.__mro__):
        return "array"
    code = issubclass(cls, nn.Module | type) or any("__call__" in base.__dict__ for base in cls.__mro__)
    return "object" if cls.__dictoffset__ and not code else ""


MAX_ENTRIES = 1000
"""Of larger containers the length alone is compared."""


def snapshot(value: Any, depth: int = 3, objects: bool = False) -> Any:
    """Return what shows later that a value was changed in place: versions of tensors, and what containers hold.

    Args:
        value: Anything.
        depth: How many containers inside of each other are looked into.
        objects: Whether attributes of objects count too.
    """
    kind = _kind(type(value))
    if not kind or (kind == "object" and not objects):
        return None
    if kind == "tensor":
        return version_of(value)
    if kind == "array":
        return value.copy()
    if kind == "object":
        value = vars(value)
    if len(value) > MAX_ENTRIES:
        return len(value)
    if kind != "sequence":
        value = (*value, *value.values())
    return [(v, snapshot(v, depth - 1, objects)) for v in value] if depth else None


def is_unchanged(value: Any, then: Any, before: Any, may_grow: bool = False) -> bool:
    """Whether a value is what it was, as :func:`snapshot` then. What is computed anew in each call may be equal.

    Args:
        value: What is there now.
        then: What was there.
        before: Its snapshot then.
        may_grow: Whether a dictionary may have new keys, as a cache has.
    """
    if value is not then:
        return equal(value, then)
    if before is None:
        return True
    now = snapshot(value, objects=True)
    if not isinstance(before, list) or not isinstance(now, list):
        return equal(now, before)
    if may_grow and isinstance(value, dict):
        keys, held = before[: len(before) // 2], before[len(before) // 2 :]
        return all(k in value and is_unchanged(value[k], *b) for (k, _), b in zip(keys, held, strict=True))
    return len(now) == len(before) and all(is_unchanged(a, *b) for (a, _), b in zip(now, before, strict=True))


def equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors and NumPy arrays among them, and nan equal to nan."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a.detach(), b.detach()))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(x is y or equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] or equal(a[key], b[key]) for key in a)
    if _kind(type(a)) == "array":
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)
