"""What a block with activation checkpointing changes besides its output, and what others change before its recompute.

NOTE [Buffers of a recompute]
The recompute of a block must see its buffers as the forward pass saw them, and must leave them as they are. A block's
own buffers are compared before and after its forward pass, by identity and version, and in its first call in each
training mode by value too: batch norm and ``.data`` change them without a new version. Of what changed, the values from
before are kept. The recompute computes with clones of those by a torch function mode (see NOTE [Substitution]), so
nothing in the module changes that another thread could see, except that buffers which the block replaces by assignment
are restored at its end. What others replace before the recompute is treated alike. What they change in place, and
weights that they change, are refused; but where there are several processes, DDP broadcasts buffers in place, and such
buffers have their new values.

Python objects cannot be substituted. If the recompute changes again what the forward pass changed, a warning says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled._log import warn
from lt_tiled.tiling.recompute import (
    MODULE_ATTRIBUTES,
    SMALL_BUFFER,
    ModuleState,
    changed_between,
    is_unchanged,
    snapshot,
    training_set,
    version_of,
)
from lt_tiled.tiling.weights import Substituted


@dataclass
class Seen:
    """What the calls of one block showed."""

    modes: set[Hashable] = field(default_factory=set)
    """The training modes in which buffers were compared by value."""
    changing: WeakKeyDictionary[nn.Module, set[str]] = field(default_factory=WeakKeyDictionary)
    """The names of buffers that changed in a call."""
    watched: set[bool] = field(default_factory=set)
    """The training modes in which attributes were compared."""
    suspects: set[tuple[int, str]] = field(default_factory=set)
    """The attributes that a forward pass changed, until a recompute showed whether it changes them again."""
    own: WeakKeyDictionary[nn.Module, set[str]] = field(default_factory=WeakKeyDictionary)
    """The names of attributes that a forward pass changed."""


class _Buffer(NamedTuple):
    """A buffer as it was before a forward pass."""

    owner: nn.Module
    name: str
    tensor: Tensor | None
    version: int
    copy: Tensor | None
    existed: bool = True

    @classmethod
    def now(cls, owner: nn.Module, name: str, large: bool) -> _Buffer:
        """Return the buffer as it is, copied if it is small or ``large`` is true."""
        tensor = owner._buffers.get(name)
        if tensor is None:
            return cls(owner, name, None, 0, None)
        strided = tensor.layout is torch.strided and not tensor.is_nested
        copied = strided and (large or tensor.numel() * tensor.itemsize <= SMALL_BUFFER)
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad) if copied else None
        return cls(owner, name, tensor, version_of(tensor), copy)

    def changed(self, by_value: bool) -> bool:
        """Return whether it is another tensor or has other values."""
        now = self.owner._buffers.get(self.name)
        if now is not self.tensor:
            return True
        if now is None or version_of(now) != self.version:
            return now is not None
        readable = type(now) is Tensor and now.device.type != "meta"
        return by_value and self.copy is not None and readable and not torch.equal(self.copy, now)

    def without_copy(self) -> _Buffer:
        return _Buffer(self.owner, self.name, self.tensor, self.version, None, self.existed)

    @property
    def lost(self) -> bool:
        """Whether the value from before is gone: it was changed in place, and there is no copy."""
        return self.copy is None and self.tensor is not None and version_of(self.tensor) != self.version

    @property
    def value(self) -> Tensor | None:
        """The value from before."""
        return self.tensor if self.copy is None else self.copy

    def __str__(self) -> str:
        shape = "" if self.tensor is None else f" of shape {list(self.tensor.shape)}"
        return f"{type(self.owner).__name__}.{self.name}{shape}"


class SideEffects:
    """What one call of a block changes: see NOTE [Buffers of a recompute].

    Args:
        block: The block.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        seen: What its earlier calls showed.
    """

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen) -> None:
        self._block, self._parts = block, _parts(block)
        self._buffers = Buffers(block, [part for part in self._parts if part._buffers], seen)
        self._seen, self._modes = seen, [(part, part.training) for part in self._parts]
        self._state: ModuleState | None = None
        self._watch = None
        # Engines set attributes of their own on modules, and ZeRO-3 frees weights that a complete recompute would need.
        if not _engine() and (seen.suspects or block.training not in seen.watched):
            names = list(inspect.signature(type(block).forward).parameters)[1:]
            self._watch = _Watch(block, {**dict(zip(names, args, strict=False)), **kwargs}, seen)

    @property
    def early_stop(self) -> bool:
        """Whether the recompute may stop as soon as it has what the backward pass needs."""
        return self._watch is None or not self._watch.complete

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the block's forward pass when called first, and its recompute later."""
        if self._state is not None:
            self._state.check(type(self._block).__name__, "the recompute", _REMEDY)
            watch = self._watch.recompute() if self._watch is not None else nullcontext()
            with training_set(self._modes), self._buffers.restored(), watch:
                return forward()
        output = forward()
        self._buffers.keep_changed()
        if self._watch is not None:
            self._watch.end_forward()
        held = ("_parameters",) if _engine() else ("_parameters", "__dict__")
        self._state = ModuleState(self._parts, _engine(), held=held, substituted=False, changing=self._seen.own)
        return output


class Buffers:
    """The buffers of a block before one of its forward passes.

    Args:
        block: The block.
        owners: Its modules that have buffers.
        seen: What its earlier calls showed.
    """

    def __init__(self, block: nn.Module, owners: list[nn.Module], seen: Seen) -> None:
        self._block, self._owners, self._seen = block, owners, seen
        mode = tuple(owner.training for owner in self._owners)
        self._first = mode not in seen.modes
        seen.modes.add(mode)
        self._before = [
            _Buffer.now(owner, name, self._first or name in seen.changing.get(owner, ()))
            for owner in self._owners
            for name in owner._buffers
        ]

    def keep_changed(self) -> None:
        """Keep the values from before the forward pass of what it changed, and drop the other copies.

        Raises:
            RuntimeError: If such a value is lost.
        """
        if not self._owners and not self._first:
            return
        before, changing = self._before, self._seen.changing
        known = {(b.owner, b.name) for b in before}
        owners = _parts(self._block) if self._first else self._owners
        new = ((owner, name) for owner in owners for name in owner._buffers if (owner, name) not in known)
        created = [_Buffer(owner, name, None, 0, None, existed=False) for owner, name in new]
        for b in created + [b for b in before if b.changed(self._first)]:
            changing.setdefault(b.owner, set()).add(b.name)
        # Small buffers next to one that changes may change too, in ways that are not seen, as batch norm's do.
        self._before = [b if b.owner in changing else b.without_copy() for b in before] + created
        if lost := next((b for b in self._before if b.lost), None):
            raise RuntimeError(
                f"{type(self._block).__name__}: its forward pass changed the buffer {lost} in place for the first time,"
                " and the recompute needs the old values. Buffers of more than 1 MiB are copied only once a call showed"
                f" that they change. Replace the buffer instead (self.buffer = ...), or {_REMEDY}."
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Compute with the values from before the forward pass, and leave the block's buffers as they are now."""
        before = [b for b in self._before if b.copy is not None or b.changed(False) or not b.existed]
        if not before:
            yield
            return
        now = [(b.owner._buffers, b.name, b.owner._buffers.get(b.name)) for b in before]
        pairs: list[tuple[Tensor, Tensor]] = []
        mode: Substituted | None = None
        try:
            for b, (holder, name, there) in zip(before, now, strict=True):
                if b.lost:
                    if _engine():  # DDP broadcasts buffers in place, with the values that they have
                        continue
                    change = f"{b} was changed in place"
                    raise changed_between(type(self._block).__name__, change, "the recompute", _REMEDY)
                value = b.value
                if value is not None and there is not None:
                    pairs.append((there, value.detach().requires_grad_(value.requires_grad).clone()))
                elif b.existed:
                    holder[name] = value
                else:
                    holder.pop(name, None)
            mode = Substituted(pairs)
            with mode:
                yield
        finally:
            if mode is not None:
                mode.end()
            for holder, name, there in now:
                if holder.get(name) is not there:
                    holder[name] = there


class _Watch:
    """Warns if a recompute changes the attributes, lists and numbers again that the forward pass changed."""

    def __init__(self, block: nn.Module, arguments: dict[str, Any], seen: Seen) -> None:
        self._block, self._seen = block, seen
        self.complete = bool(seen.suspects)
        """Whether the recompute must run to its end, because an earlier one may have stopped before the change."""
        self._parts = list(block.modules())
        self._places = [(type(part).__name__, part.__dict__) for part in self._parts]
        self._places.append(("argument", {k: v for k, v in arguments.items() if not isinstance(v, Tensor)}))
        first = block.training not in seen.watched
        seen.watched.add(block.training)
        self._before = self._now() if first else None

    def end_forward(self) -> None:
        """Note what the forward pass changed."""
        if self._before is not None:
            changed = self._changed(self._before)
            self._seen.suspects.update(changed)
            for index, name in changed:
                if index < len(self._parts):
                    self._seen.own.setdefault(self._parts[index], set()).add(name)
            self._before = None

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Warn of what changes inside."""
        suspects = self._seen.suspects
        if not suspects:
            yield
            return
        before = {key: value for key, value in self._now().items() if key in suspects}
        try:
            yield
        finally:
            again = self._changed(before) & suspects
            for index, name in again:
                self._warn(self._places[index][0], name)
            suspects -= again
            if self.complete:
                suspects.clear()

    def _now(self) -> _State:
        return {
            (index, name): (value, snapshot(value))
            for index, (_, holder) in enumerate(self._places)
            for name, value in holder.items()
            if name not in MODULE_ATTRIBUTES
        }

    def _changed(self, before: _State) -> set[tuple[int, str]]:
        now = self._now()
        missing = before.keys() ^ now.keys()
        for key in before.keys() & now.keys():
            with suppress(Exception):  # of values that cannot be compared
                if not is_unchanged(now[key][0], *before[key]):
                    missing.add(key)
        return missing

    def _warn(self, where: str, name: str) -> None:
        block = type(self._block).__name__
        what = f"its argument {name}" if where == "argument" else f"{where}.{name}"
        warn(
            f"{block} changes {what} in its forward pass, and activation checkpointing changes it once more in the"
            " recompute, which also reads the new value. Return what is collected as an output, make a number a buffer"
            " (register_buffer), whose value is restored, or leave the block out of Checkpointing(targets=...).",
            once=f"side effect {block} {what}",
        )


_REMEDY = "leave the block out of Checkpointing(targets=...)"


def _engine() -> bool:
    return dist.is_available() and dist.is_initialized()


_State = dict[tuple[int, str], tuple[Any, Any]]


def _parts(block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block, shared ones several times. ``block.modules()`` takes three times as long."""
    found, left = [], [block]
    while left:
        part = left.pop()
        found.append(part)
        left.extend(child for child in part._modules.values() if child is not None)
    return found
