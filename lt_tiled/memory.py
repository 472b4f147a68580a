"""The peak memory of some work: of the accelerator if there is one, otherwise of the process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Reads the peak memory since the last :meth:`reset`.

    On an accelerator this is what its allocator counts, such as ``torch.cuda.max_memory_allocated``. On a CPU it is the
    resident memory of the process: ``VmHWM`` on Linux, which can be reset, and elsewhere the peak since its start.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts = provides(device, "max_memory_allocated")  # CPUs and MPS have no peak counter

    def reset(self) -> None:
        if self.counts:
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
            return
        with suppress(OSError):
            _CLEAR.write_text("5")  # proc(5): resets the peak resident set size

    def read(self) -> int:
        """Return the peak in bytes."""
        if self.counts:
            return int(torch.get_device_module(self.device).max_memory_allocated(self.device))
        try:
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def describe(self, peak: int) -> str:
        """Return a peak as text, with what it measures."""
        where = f"allocated on {self.device}" if self.counts else "resident, whole process"
        return f"{gib(peak)} ({where})"


def provides(device: torch.device, name: str) -> bool:
    """Return whether torch's module for this type of device has a function. Some, such as ``meta``, have no module."""
    return hasattr(getattr(torch, device.type, None), name)


def gib(nbytes: float) -> str:
    """Return bytes as text in GiB, or in MiB below 128 MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
