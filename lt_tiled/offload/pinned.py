"""CPU memory in pinned slabs, and the copies between it and devices, on a stream of their own.

NOTE [Streams]
Each device has one copy stream, so its copies run in order. A copy waits for the event after which its source is
complete and its destination free; the current stream waits for a loaded tensor before it uses it. :class:`CPUMemory`
keeps both ends of a copy until its event has passed, so neither is reused before, and torch's allocator need not know
of the second stream: with ``record_stream`` freed memory would count until the device has caught up with the host. Only
a loaded tensor that is used on another stream than the one for which it was allocated is recorded. A tensor is stored
on the stream on which it was saved. Threads that write to disk wait for the copy's event, never use the
current stream, and set the current device: on any other they would create a context.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.memory import gib
from lt_tiled.offload.extents import Extent, Extents, aligned

SLAB = 256 * 2**20
"""The bytes of a slab, unless the budget leaves less."""
PIECE = 2**20
"""The fewest bytes of a part of a tensor that is split between slabs."""


@dataclass(eq=False)
class Slot:
    """Ranges of slabs and their memory, which are in use until the slot is dropped."""

    ranges: list[Extent]
    memory: list[Tensor]


class Copy:
    """A copy between a tensor and a slot. A GPU runs it until its ``end`` has passed; other copies have ended."""

    def __init__(self, tensor: Tensor, slot: Slot, end: torch.cuda.Event | None = None) -> None:
        self.slot, self.end, self.device = slot, end, tensor.device
        self.tensor: Tensor | None = tensor
        """The tensor, which is dropped when the host or a stream has waited for the copy."""

    def done(self) -> bool:
        return self.end is None or self.end.query()

    def wait(self) -> None:
        """Let the host wait until it has ended."""
        if self.end is not None:
            with torch.cuda.device(self.device):
                self.end.synchronize()
        self.tensor = None

    def wait_on_stream(self) -> None:
        """Let the current stream wait until it has ended, so that the tensor may be used, and freed, on it."""
        if self.end is not None:
            torch.cuda.current_stream(self.device).wait_event(self.end)
        self.tensor = None


class CPUMemory:
    """CPU memory up to a budget in bytes, and copies between it and devices.

    It grows by slabs. torch's pinned allocator rounds each allocation up to a power of two; a slab has exactly the size
    requested and is pinned as a whole. If the system refuses to pin it, it is used unpinned, with one warning. Tensors
    may be split between slabs, so tensors of any size, and of other sizes than before, can use the whole budget. The
    offloader's lock protects it; only :meth:`copy` may be called on other threads.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self._pin = budget, True
        self._slabs: list[tuple[Tensor, Extents]] = []
        self._unpin: list[weakref.finalize[[int], CPUMemory]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: deque[Copy] = deque()  # other threads append

    @property
    def size(self) -> int:
        return sum(memory.nbytes for memory, _ in self._slabs)

    def take(self, nbytes: int, device: torch.device) -> Slot | None:
        """Return room for ``nbytes``, pinned if the device is a GPU, or ``None`` if the budget has none."""
        if nbytes > self.budget:
            return None
        while self._running and self._running[0].done():
            self._running.popleft()
        while (slot := self._take(nbytes)) is None:
            if not self._grow(device) and not self._wait_for_a_copy():
                return None
        return slot

    def _take(self, nbytes: int) -> Slot | None:
        slot = Slot([], [])
        for slab, extents in self._slabs:
            while nbytes > 0 and (extent := extents.take(aligned(nbytes), PIECE)) is not None:
                slot.ranges.append(extent)
                slot.memory.append(slab[extent.offset : extent.offset + min(nbytes, extent.length)])
                nbytes -= extent.length
        return None if nbytes > 0 else slot

    def _wait_for_a_copy(self) -> bool:
        """Wait for a running copy, after which its slot may be free; return whether there was one."""
        if not self._running:
            return False
        self._running[0].wait()
        self._running.popleft()
        return True

    def _grow(self, device: torch.device) -> bool:
        """Allocate one more slab; return whether the budget and the system have room for it."""
        size = min(SLAB, (self.budget - self.size) // mmap.PAGESIZE * mmap.PAGESIZE)
        if not size:
            return False
        try:
            pages = mmap.mmap(-1, size)
        except OSError:
            budget = gib(self.budget)
            warn(f"Cannot allocate {gib(size)} of CPU memory for offloading (budget {budget}): lower cpu_budget.")
            self.budget = self.size
            return False
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if device.type == "cuda" and self._pin:
            self._pin = _pin_pages(memory, device)
            if self._pin:
                unpin = torch.cuda.cudart().cudaHostUnregister
                self._unpin.append(weakref.finalize(self, unpin, memory.data_ptr()))
            else:
                warn("The system refuses to pin CPU memory (see ulimit -l): copies to it are slower and block.")
        self._slabs.append((memory, Extents(size)))
        return True

    def copy(
        self, verb: Literal["store", "load"], tensor: Tensor, slot: Slot, after: torch.cuda.Event | None = None
    ) -> Copy:
        """Begin to copy the bytes of a tensor to a slot, or back.

        On a GPU it begins after an event, by default after the current stream's work so far. Copies of other devices
        have ended when this returns.
        """
        device = tensor.device
        parts = zip(tensor.split([memory.nbytes for memory in slot.memory]), slot.memory, strict=True)
        pairs = [(memory, part) if verb == "store" else (part, memory) for part, memory in parts]
        if device.type != "cuda":
            for into, source in pairs:
                into.copy_(source)
            return Copy(tensor, slot)
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            # The current stream may be another one at each call.
            stream.wait_event(after or torch.cuda.current_stream(device).record_event())
            copy = Copy(tensor, slot, torch.cuda.Event(blocking=True))
            try:
                with torch.cuda.stream(stream):
                    for into, source in pairs:
                        into.copy_(source, non_blocking=True)
                stream.record_event(copy.end)
                self._running.append(copy)
            except BaseException:  # after Ctrl-C, nothing else knows of a copy that has begun
                stream.synchronize()
                raise
        return copy

    def free_buffers(self) -> None:
        """Return all slabs to the system if none is in use. The next tensor allocates new ones."""
        while self._wait_for_a_copy():
            pass
        if not any(extents.used for _, extents in self._slabs):
            self._release()

    def close(self) -> None:
        """Wait for all copies, and unpin the slabs; the last tensor on each one frees it."""
        for stream in self._streams.values():
            stream.synchronize()
        self._running.clear()
        self._release()
        self.budget = 0

    def _release(self) -> None:
        while self._unpin:
            self._unpin.pop()()
        self._slabs.clear()


def _pin_pages(memory: Tensor, device: torch.device) -> bool:
    portable = 1  # for all GPUs of the process
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)) == 0:
            return True
        with suppress(RuntimeError):  # CUDA reports the error to the next call, so make one
            torch.zeros(1, device=device)
    return False
