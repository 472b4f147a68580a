"""Pinned CPU memory in slabs, and copies between it and a device on a stream of their own.

NOTE [Streams]
Each device has one copy stream, so its copies run in order. A copy waits for the event after which its source is
complete and its destination free; the current stream waits for a loaded tensor before it uses it. A :class:`Copy`
keeps its tensor until its event has passed, so that torch's allocator need not know of the second stream: with
``record_stream`` freed memory would count until the device has caught up with the host. Only a tensor that is dropped
during its copy is recorded, and one that is stored while another stream is the current one than when it was saved.
That stream first waits for the event after which the tensor is computed. A slot of pinned memory is reused once the
event after its last copy has passed. Threads that write to disk wait for the copy's event, never use the current
stream, and set the current device: on any other they would create a context.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from lt_tiled._log import inform, warn
from lt_tiled.memory import gib
from lt_tiled.offload.extents import Extent, Extents, aligned
from lt_tiled.offload.spill import PIECE

SLAB = 256 * 2**20
"""The bytes of a slab, unless the budget leaves less."""


class Slabs:
    """Ranges of slabs of CPU memory that together never exceed a budget in bytes.

    torch's pinned allocator rounds each allocation up to a power of two. A slab has exactly the size requested and is
    pinned as a whole. If the system refuses to pin it, it is used unpinned, with one warning. Tensors may be split
    between slabs, so tensors of any size, and of other sizes than before, can use the whole budget.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self._pin = budget, True
        self._slabs: list[tuple[Tensor, Extents]] = []
        self._unpin: list[weakref.finalize[[int], Slabs]] = []
        self._lock = Lock()
        # Slots may be dropped while this thread holds the lock, so they only append here.
        self._freed: deque[tuple[list[Extent], torch.cuda.Event]] = deque()

    def take(self, nbytes: int, device: torch.device) -> Slot | None:
        """Return room for ``nbytes``, pinned if the device is a GPU, or ``None`` if the budget has none."""
        if nbytes > self.budget:
            return None
        with self._lock:
            self._collect()
            while (slot := self._take(nbytes)) is None:
                if not self._grow(device) and not self._collect(wait=True):
                    break
            return slot

    def _collect(self, wait: bool = False) -> bool:
        """Free the ranges whose copies have ended; ``wait`` for the first one. Return whether any was freed."""
        if wait and self._freed:
            self._freed[0][1].synchronize()
        freed = False
        for _ in range(len(self._freed)):
            if self._freed[0][1].query():
                self._freed.popleft()
                freed = True
            else:
                self._freed.rotate(-1)
        return freed

    def _take(self, nbytes: int) -> Slot | None:
        ranges: list[Extent] = []
        memory: list[Tensor] = []
        for slab, extents in self._slabs:
            while nbytes > 0 and (extent := extents.take(aligned(nbytes), PIECE)) is not None:
                ranges.append(extent)
                memory.append(slab[extent.offset : extent.offset + min(nbytes, extent.length)])
                nbytes -= extent.length
        return None if nbytes > 0 else Slot(ranges, memory, self._freed)

    def _grow(self, device: torch.device) -> bool:
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

    @property
    def size(self) -> int:
        """The bytes of all slabs."""
        return sum(memory.nbytes for memory, _ in self._slabs)

    def free_unused(self) -> None:
        """Return all slabs to the system if none is in use. The next tensor allocates new ones."""
        with self._lock:
            while self._collect(wait=True):
                pass
            if not any(extents.used for _, extents in self._slabs):
                self._release()

    def _release(self) -> None:
        while self._unpin:
            self._unpin.pop()()
        self._slabs.clear()

    def close(self) -> None:
        """Unpin the slabs; the last tensor on each one frees it."""
        self._release()
        self._freed.clear()
        self.budget = 0


@dataclass(eq=False)
class Slot:
    """Ranges of slabs and their memory. They are free when the slot is dropped and its last copy has ended."""

    ranges: list[Extent]
    memory: list[Tensor]
    freed: deque[tuple[list[Extent], torch.cuda.Event]]
    copied: torch.cuda.Event | None = None
    """The end of the last copy. One stream runs them in order."""

    def __del__(self) -> None:
        if self.copied is not None:
            self.freed.append((self.ranges, self.copied))


def _pin_pages(memory: Tensor, device: torch.device) -> bool:
    portable = 1  # for all GPUs of the process
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)) == 0:
            return True
        with suppress(RuntimeError):  # CUDA reports the error to the next call, so make one
            torch.zeros(1, device=device)
    return False


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of CPU memory that the system, or this process's cgroups, can allocate now."""
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(min([available, *_cgroup_memory(root)]), 0)


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup that has a limit: the process's own and all above it.

    psutil does not read them.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                mount, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cache = "total_inactive_file"
            else:
                continue
            group = mount / path.lstrip("/")  # in a container it may not be there, but the mount is the container's
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # ValueError: no limit, "max"
                    free = int((folder / limit).read_text()) - int((folder / usage).read_text())
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    yield free + int(stat.get(cache, 0))  # the kernel frees unused page cache first


@dataclass(eq=False)
class Copy:
    """A copy that a GPU runs on a stream. It keeps the tensor on the GPU until it has ended. See NOTE [Streams]."""

    end: torch.cuda.Event
    stream: torch.cuda.Stream
    tensor: Tensor | None

    def ended(self) -> bool:
        """Return whether it has ended."""
        if self.tensor is not None and self.end.query():
            self.tensor = None
        return self.tensor is None

    def __del__(self) -> None:
        if self.tensor is not None:
            self.tensor.record_stream(self.stream)


class Copier:
    """Copies between GPUs and CPU memory on one stream per GPU. Copies of other devices are synchronous."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(
        self, verb: Literal["store", "load"], tensor: Tensor, slot: Slot, after: torch.cuda.Event | None = None
    ) -> Copy | None:
        """Begin to copy the bytes of a tensor to a slot, or back, and return the copy if it runs on.

        It begins after an event, by default after the current stream's work so far.
        """
        device = tensor.device
        parts = zip(tensor.split([memory.nbytes for memory in slot.memory]), slot.memory, strict=True)
        pairs = [(memory, part) if verb == "store" else (part, memory) for part, memory in parts]
        if device.type != "cuda":
            if device.type != "cpu":
                kind = f"Offloading from {device.type} goes through CPU memory that is not pinned"
                inform(f"{kind}, and copies block: only those of CUDA and ROCm run in the background.", once=kind)
            for into, source in pairs:
                into.copy_(source)
            return None
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            # The current stream may be another one at each call.
            stream.wait_event(after or torch.cuda.current_stream(device).record_event())
            copied = Copy(torch.cuda.Event(blocking=True), stream, tensor)
            try:
                with torch.cuda.stream(stream):
                    for into, source in pairs:
                        into.copy_(source, non_blocking=True)
                stream.record_event(copied.end)
                slot.copied = copied.end
            except BaseException:  # after Ctrl-C, nothing else knows of a copy that has begun
                stream.synchronize()
                raise
        return copied

    def synchronize(self) -> None:
        """Wait for all copies."""
        for stream in self._streams.values():
            stream.synchronize()
