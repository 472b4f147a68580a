"""The peak memory of a span of work: of the accelerator if there is one, else of the process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Reads the peak since the last :meth:`reset`.

    On CUDA it is ``torch.cuda.max_memory_allocated``. On a CPU it is the process's resident memory (``VmHWM``, which
    Linux resets on request; elsewhere the peak since the process began).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with suppress(OSError):
            _CLEAR.write_text("5")  # proc(5): resets the peak resident set size

    def read(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def describe(self, peak: int) -> str:
        where = f"allocated on {self.device}" if self.device.type == "cuda" else "resident, whole process"
        return f"{peak / 2**30:.2f} GiB ({where})"
