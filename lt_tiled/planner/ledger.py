"""Live bytes over a step: what was allocated when, for how long, and for which part of the training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


@dataclass
class Allocation:
    """Bytes that were alive from one moment to another; moments count allocations and releases."""

    nbytes: int
    part: str
    """What they were for: ``"weights"``, ``"attention"``, ..."""
    place: str
    """What was running."""
    born: int
    died: int | None = None


@dataclass(frozen=True)
class Place:
    """What is running."""

    part: str
    path: str


class Ledger(TorchDispatchMode):
    """Books the storages that operations make while it is entered, real or fake ones, and what is held by hand.

    Args:
        where: Says what is running.
        only: Books storages of this device type alone.
    """

    def __init__(self, where: Callable[[], Place] = lambda: Place("rest", ""), only: str | None = None) -> None:
        super().__init__()
        self.where = where
        self.only = only
        self.now = self.peak = 0
        """Bytes."""
        self.clock = self.peak_at = 0
        self.allocations: list[Allocation] = []
        self._live: dict[int, Allocation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in _plain_tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors(result):
            if self._books(tensor) and tensor.untyped_storage()._cdata not in before:
                self._track(tensor.untyped_storage())
        return result

    def _books(self, tensor: Tensor) -> bool:
        return tensor.device.type != "meta" and self.only in (None, tensor.device.type)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = self._add(storage.nbytes(), self.where())
        weakref.finalize(storage, self._forget, key).atexit = False

    def _add(self, nbytes: int, place: Place) -> Allocation:
        self.clock += 1
        allocation = Allocation(nbytes, place.part, place.path, self.clock)
        self.allocations.append(allocation)
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, self.clock
        return allocation

    def _forget(self, key: int) -> None:
        if (allocation := self._live.pop(key, None)) is not None:
            self._end(allocation)

    def _end(self, allocation: Allocation) -> None:
        self.clock += 1
        allocation.died = self.clock
        self.now -= allocation.nbytes

    def hold(self, nbytes: int, part: str, path: str = "") -> Callable[[], None]:
        """Book bytes that no operation makes, until the function that is returned is called; further calls do
        nothing.
        """
        held = [self._add(nbytes, Place(part, path))]

        def release() -> None:
            while held:
                self._end(held.pop())

        return release

    def book(self, tensor: Tensor, part: str) -> None:
        """Book a tensor that was there before."""
        for plain in _plain_tensors(tensor):
            if self._books(plain):
                self._track(plain.untyped_storage())
                self.name(plain, part)

    def name(self, tensor: Tensor, part: str) -> None:
        """Say what a tensor's storage is for, whatever made it."""
        if (allocation := self._live.get(tensor.untyped_storage()._cdata)) is not None:
            allocation.part = part

    def drop(self, tensor: Tensor) -> None:
        """Book a tensor's storage no longer: it stands for something that would not be there."""
        self._forget(tensor.untyped_storage()._cdata)

    def restart_peak(self) -> None:
        """Count the peak from now on."""
        self.peak, self.peak_at = self.now, self.clock

    def alive_at(self, moment: int) -> list[Allocation]:
        """What was alive then."""
        return [a for a in self.allocations if a.born <= moment and (a.died is None or a.died > moment)]


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors that hold memory: of a wrapper, such as a DTensor, those inside of it."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            known: Any = leaf  # as the narrowed type would have no other members
            wrapped = is_traceable_wrapper_subclass(known)
            yield from (
                _plain_tensors([getattr(leaf, name) for name in known.__tensor_flatten__()[0]]) if wrapped else (leaf,)
            )
