"""Page-locked RAM in slabs of exact size, and copies to and from it beside the computation."""

from __future__ import annotations

import mmap
from collections import deque
from threading import Lock

import torch
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.offload.extents import Extents, aligned

SLAB = 256 * 2**20
"""Bytes of a slab, unless a tensor needs more or the budget leaves less."""


class Slabs:
    """Ranges of RAM out of slabs that together never exceed a budget.

    torch's own pinned allocator rounds each allocation up to a power of two, up to twice the RAM; a slab has the size that it was asked
    to have and is page-locked as a whole. Where the system refuses to lock it, it is used as it is, with one warning.

    Args:
        budget: Bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.size = 0
        self._pin = True
        self._slabs: list[tuple[Tensor, Extents, bool]] = []
        self._lock = Lock()
        self._freed: deque[tuple[int, int, int]] = deque()

    def take(self, nbytes: int, pin: bool) -> Slot | None:
        """A range of ``nbytes``, page-locked for a CUDA device if ``pin``, or ``None`` if the budget has no room for it."""
        need = aligned(nbytes)
        with self._lock:
            while self._freed:
                index, offset, length = self._freed.popleft()
                self._slabs[index][1].give_back(offset, length)
            slot = self._take(need, nbytes)
            return slot if slot is not None or not self._grow(need, pin) else self._take(need, nbytes)

    def _take(self, need: int, nbytes: int) -> Slot | None:
        for index, (memory, extents, _) in enumerate(self._slabs):
            if (offset := extents.take(need)) is not None:
                return Slot(self, index, offset, need, memory[offset : offset + nbytes])
        return None

    def give_back(self, slot: Slot) -> None:
        """Free a range. Only appends: finalizers call this, at any moment."""
        self._freed.append((slot.index, slot.offset, slot.length))

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
            warn("The system refuses to page-lock RAM (see ulimit -l): copies to it are slower and wait for each other.")
            self._pin = False
        self._slabs.append((memory, Extents(size), locked))
        self.size += size
        return True

    def close(self) -> None:
        """Unlock the pages; they are freed with the last tensor on them."""
        for memory, _, locked in self._slabs:
            if locked:
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._slabs.clear()
        self._freed.clear()
        self.budget = self.size = 0


class Slot:
    """One range of a slab, and its memory."""

    def __init__(self, slabs: Slabs, index: int, offset: int, length: int, memory: Tensor) -> None:
        self.index = index
        self.offset = offset
        self.length = length
        self.memory = memory
        self._slabs: Slabs | None = slabs

    def free(self) -> None:
        if self._slabs is not None:
            self._slabs.give_back(self)
            self._slabs = None


def _lock_pages(memory: Tensor) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


class Copier:
    """Copies between a device and RAM on a stream of its own. For CPU tensors there is no stream, and a copy is done at once.

    All copies go through one stream, in order, so a range of RAM may be given to the next copy while the last one still reads it.
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
            event: torch.cuda.Event = self.stream.record_event()
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
