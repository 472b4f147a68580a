"""The peak memory of the accelerator, or of the process without one, and the CPU memory that is available."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

_CGROUPS = {
    "sys/fs/cgroup": ("memory.max", "memory.current", "inactive_file"),
    "sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Where each version of cgroups has its files of the limit and the use, and the figure of page cache."""


class PeakMemory:
    """Reads the peak memory since the last :meth:`reset`.

    On an accelerator this is what its allocator counts, such as ``torch.cuda.max_memory_allocated``. On a CPU it is the
    resident memory of the process: ``VmHWM``, which can be reset, or where ``/proc`` lacks it the peak since its start.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts = provides(device, "max_memory_allocated")  # CPUs and MPS have no peak counter

    def reset(self) -> None:
        if self.counts:
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

    def read(self) -> int:
        """Return the peak in bytes."""
        if self.counts:
            return int(torch.get_device_module(self.device).max_memory_allocated(self.device))
        try:
            return 1024 * _figure(Path("/proc/self/status"), "VmHWM:")
        except (OSError, KeyError):
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def describe(self, peak: int) -> str:
        """Return a peak as text, with what it measures."""
        if self.counts:
            return f"{gib(peak)} (allocated on {self.device})"
        return f"{gib(peak)} (resident, whole process)"


def provides(device: torch.device, name: str) -> bool:
    """Return whether torch's module for this type of device has a function. Some, such as ``meta``, have no module."""
    return hasattr(getattr(torch, device.type, None), name)


def gib(nbytes: float) -> str:
    """Return bytes as text in GiB, or in MiB below 128 MiB."""
    if nbytes < 2**27:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**30:.2f} GiB"


def _figure(path: Path, name: str) -> int:
    """Return the number that a file of Linux has behind a name at the beginning of a line."""
    found = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    if found is None:
        raise KeyError(name)
    return int(found[1])


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of CPU memory that the system, or this process's cgroups, can allocate now."""
    available = 1024 * _figure(root / "proc/meminfo", "MemAvailable:")
    return max(min([available, *_cgroup_memory(root)]), 0)


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup that has a limit: the process's own and all above it.

    psutil does not read them.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = line.split(":", 2)[2].lstrip("/")
            for mount, (limit, use, cache) in _CGROUPS.items():
                group = root / mount / path  # in a container it may not be there, but the mount is the container's
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError):  # ValueError: no limit, "max"
                        free = int((folder / limit).read_text()) - int((folder / use).read_text())
                        with suppress(KeyError):
                            free += _figure(folder / "memory.stat", cache)  # the kernel frees unused page cache first
                        yield free
