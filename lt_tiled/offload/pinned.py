"""Pinned CPU memory in slabs, and copies between it and a device on a stream of their own.

NOTE [Streams]
Each device has one copy stream, so its copies run in order. A copy waits for the event after which its source is
complete and its destination free; the current stream waits for a loaded tensor before it uses it. ``record_stream``
tells torch's allocator of the second stream. A slot of pinned memory is reused once the event after its last copy has
passed. Threads that write to disk wait for the copy's event and never use the current stream.
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

import torch
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.memory import gib
from lt_tiled.offload.extents import Extent, Extents, aligned

SLAB = 256 * 2**20
"""The bytes of a slab, unless a tensor needs more or the budget leaves less."""


class Slabs:
    """Ranges of slabs of CPU memory that together never exceed a budget in bytes.

    torch's pinned allocator rounds each allocation up to a power of two. A slab has exactly the size requested and is
    pinned as a whole. If the system refuses to pin it, it is used unpinned, with one warning.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self._pin = budget, True
        self._slabs: list[tuple[Tensor, Extents]] = []
        self._unpin: list[weakref.finalize[[int], Slabs]] = []
        self._lock = Lock()
        # Slots may be dropped while this thread holds the lock, so they only append here.
        self._freed: deque[tuple[Extent, torch.cuda.Event]] = deque()

    def take(self, nbytes: int, pin: bool) -> Slot | None:
        """Return a range of ``nbytes``, pinned if ``pin``, or ``None`` if the budget has no room."""
        need = aligned(nbytes)
        with self._lock:
            self._collect()
            while (slot := self._take(need, nbytes)) is None:
                if not self._grow(need, pin) and not self._collect(wait=True):
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

    def _take(self, need: int, nbytes: int) -> Slot | None:
        for memory, extents in self._slabs:
            if (extent := extents.take(need)) is not None:
                return Slot(extent, memory[extent.offset : extent.offset + nbytes], self._freed)
        return None

    def _grow(self, need: int, pin: bool) -> bool:
        size = min(max(need, SLAB), (self.budget - self.size) // mmap.PAGESIZE * mmap.PAGESIZE)
        if size < need:
            return False
        try:
            pages = mmap.mmap(-1, size)
        except OSError:
            budget = gib(self.budget)
            warn(f"Cannot allocate {gib(size)} of CPU memory for offloading (budget {budget}): lower cpu_budget.")
            self.budget = self.size
            return False
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if pin and self._pin:
            self._pin = _pin_pages(memory)
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
    """One range of a slab and its memory. It is free when the slot is dropped and its last copy has ended."""

    extent: Extent
    memory: Tensor
    freed: deque[tuple[Extent, torch.cuda.Event]]
    copied: torch.cuda.Event | None = None
    """The end of the last copy. One stream runs them in order."""

    def __del__(self) -> None:
        if self.copied is not None:
            self.freed.append((self.extent, self.copied))


def _pin_pages(memory: Tensor) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA reports the error to the next call, so make one
        torch.zeros(1, device="cuda")
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


class Copier:
    """Copies between GPUs and CPU memory on one stream per GPU. Copies of CPU tensors are synchronous."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, into: Tensor, source: Tensor, after: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Begin to copy after an event, by default the current stream's work so far. Return the end of the copy."""
        on_gpu = into if into.is_cuda else source
        if not on_gpu.is_cuda:
            into.copy_(source)
            return None
        device = on_gpu.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        # The current stream may be another one at each call.
        stream.wait_event(after or torch.cuda.current_stream(device).record_event())
        try:
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
                event: torch.cuda.Event = stream.record_event(torch.cuda.Event(blocking=True))
            on_gpu.record_stream(stream)  # the allocator reuses the memory only after the copy
        except BaseException:  # after Ctrl-C, nothing else knows of a copy that has begun
            stream.synchronize()
            raise
        return event

    def synchronize(self) -> None:
        """Wait for all copies."""
        for stream in self._streams.values():
            stream.synchronize()
