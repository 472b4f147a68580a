"""Page-locked RAM in slabs of exact size, and copies to and from it beside the computation."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.offload.extents import Extents, aligned

SLAB = 256 * 2**20
"""Bytes of a slab, unless a tensor needs more or the budget leaves less."""


class Slabs:
    """Ranges of RAM out of slabs that together never exceed a budget.

    torch's own pinned allocator rounds each allocation up to a power of two, up to twice the RAM; a slab has the size
    that it was asked to have and is page-locked as a whole. Where the system refuses to lock it, it is used as it is,
    with one warning.

    Args:
        budget: Bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.size = 0
        self._pin = True
        self._slabs: list[tuple[Tensor, Extents]] = []
        self._unlock: list[weakref.finalize[[int], Slabs]] = []
        self._lock = Lock()
        # Slots are freed by finalizers, which may run while this thread holds the lock: they only append.
        self._freed: deque[tuple[Slot, torch.cuda.Event | None]] = deque()

    def take(self, nbytes: int, pin: bool) -> Slot | None:
        """A range of ``nbytes``, page-locked for a CUDA device if ``pin``, or ``None`` if the budget has no room for
        it.
        """
        need = aligned(nbytes)
        with self._lock:
            self._collect()
            slot = self._take(need, nbytes)
            if slot is None and self._grow(need, pin):
                slot = self._take(need, nbytes)
            while slot is None and self._freed:  # room that a copy still uses
                event = self._freed[0][1]
                if event is not None:
                    event.synchronize()
                self._collect()
                slot = self._take(need, nbytes)
            return slot

    def _collect(self) -> None:
        """Take back the slots that no copy uses any more."""
        for _ in range(len(self._freed)):
            slot, event = self._freed.popleft()
            if event is None or event.query():
                self._slabs[slot.index][1].give_back(slot.offset, slot.length)
            else:
                self._freed.append((slot, event))

    def _take(self, need: int, nbytes: int) -> Slot | None:
        for index, (memory, extents) in enumerate(self._slabs):
            if (offset := extents.take(need)) is not None:
                return Slot(self, index, offset, need, memory[offset : offset + nbytes])
        return None

    def give_back(self, slot: Slot, after: torch.cuda.Event | None) -> None:
        """Free a range once a copy from or to it has ended."""
        self._freed.append((slot, after))

    def _grow(self, need: int, pin: bool) -> bool:
        size = min(max(need, SLAB), (self.budget - self.size) // mmap.PAGESIZE * mmap.PAGESIZE)
        if size < need:
            return False
        try:
            pages = mmap.mmap(-1, size)
        except OSError:
            warn(f"The system has no {size} bytes of RAM left for offloaded boundaries (of a budget of {self.budget}).")
            self.budget = self.size
            return False
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        locked = pin and self._pin and _lock_pages(memory)
        if pin and self._pin and not locked:
            warn(
                "The system refuses to page-lock RAM (see ulimit -l): copies to it are slower and wait for each other."
            )
            self._pin = False
        if locked:
            self._unlock.append(weakref.finalize(self, _unlock_pages, memory.data_ptr()))
        self._slabs.append((memory, Extents(size)))
        self.size += size
        return True

    def free_unused(self) -> None:
        """Give all slabs back to the system, unless one is in use; the next tensor gets new ones."""
        with self._lock:
            for _, event in list(self._freed):
                if event is not None:
                    event.synchronize()
            self._collect()
            if not any(extents.used for _, extents in self._slabs):
                self._unlock_all()

    def _unlock_all(self) -> None:
        while self._unlock:
            self._unlock.pop()()
        self._slabs.clear()
        self.size = 0

    def close(self) -> None:
        """Unlock the pages; they are freed with the last tensor on them."""
        self._unlock_all()
        self._freed.clear()
        self.budget = 0


class Slot:
    """One range of a slab, and its memory."""

    def __init__(self, slabs: Slabs, index: int, offset: int, length: int, memory: Tensor) -> None:
        self.index = index
        self.offset = offset
        self.length = length
        self.memory = memory
        self._slabs: Slabs | None = slabs

    def free(self, after: torch.cuda.Event | None = None) -> None:
        """Give the range back, once the copy that ``after`` ends is through. Never blocks."""
        if self._slabs is not None:
            self._slabs.give_back(self, after)
            self._slabs = None


def _lock_pages(memory: Tensor) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA hands the error to the next call that asks: this one
        torch.zeros(1, device="cuda")
    return False


def _unlock_pages(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class Copier:
    """Copies between a device and RAM on a stream of its own. For CPU tensors there is no stream, and a copy is done at
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, into: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Begin to copy what the current stream has computed by now; the event is the copy's end."""
        if self.stream is None:
            into.copy_(source)
            return None
        # The stream that computes now, not the one of some earlier time.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self.stream.record_event(torch.cuda.Event(blocking=True))
        for tensor in (into, source):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)  # the allocator waits for the copy before it hands the memory out
        return event


class Copiers(dict[torch.device, Copier]):
    """The copier of each device, made when it is first asked for."""

    def __missing__(self, device: torch.device) -> Copier:
        self[device] = Copier(device)
        return self[device]

    def synchronize(self) -> None:
        """Wait for all copies."""
        for copier in self.values():
            if copier.stream is not None:
                copier.stream.synchronize()
