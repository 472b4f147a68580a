"""Figures of what was offloaded, for one step or for several."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from lt_tiled.memory import gib


@dataclass
class OffloadStats:
    """Sums over the steps that it covers, in bytes and milliseconds.

    GPU waits are known only once the GPU has passed them, which may be in the next step.
    """

    cpu_bytes: int = 0
    """Bytes moved to CPU memory."""
    disk_bytes: int = 0
    """Bytes written to the disk, which wear an SSD."""
    over_budget_bytes: int = 0
    """Bytes that stayed on the device because the budget had no room."""
    from_memory: int = 0
    """Tensors that were needed before they had left the device."""
    prefetch_hits: int = 0
    """Tensors that were loaded by the time they were needed."""
    prefetch_misses: int = 0
    """Tensors that the backward pass had to wait for."""
    stalled_ms: float = 0.0
    """Time in which a GPU, or a model on the CPU, waited for tensors and for room to store more."""

    def __add__(self, other: OffloadStats) -> OffloadStats:
        return OffloadStats(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def metrics(self) -> dict[str, float]:
        return {f"lt_tiled/offload_{name}": float(value) for name, value in asdict(self).items()}

    def describe(self, steps: int, seconds: float | None = None) -> list[str]:
        """Return lines of text about a run of ``steps`` steps, with the SSD wear if its duration is given."""
        if not self.cpu_bytes + self.disk_bytes + self.over_budget_bytes:
            return ["nothing was offloaded: inputs under 1 MiB, and the last keep_last ones, stay on the device"]
        per_step = max(steps, 1)
        asked = self.prefetch_hits + self.prefetch_misses
        cpu, disk = (gib(nbytes / per_step) for nbytes in (self.cpu_bytes, self.disk_bytes))
        lines = [
            f"offloaded per step: {cpu} to CPU memory, {disk} to disk",
            f"loaded in time: {self.prefetch_hits} of {asked}; needed before they had left: {self.from_memory}",
            f"stalled: {self.stalled_ms / per_step:.1f} ms per step",
        ]
        if self.over_budget_bytes:
            lines.append(
                f"kept on the device, no room in the budget: {gib(self.over_budget_bytes / per_step)} per step"
            )
        if self.disk_bytes:
            lines.append(f"written to disk in all: {gib(self.disk_bytes)}")
            if seconds:
                wear = self.disk_bytes / seconds * 86400 / 1e12
                lines.append(f"SSD wear at this rate: {wear:.1f} TB per day; compare with the TBW rating of the drive")
        return lines


class StallClock:
    """Measures waits: by events on a GPU, which may be computing while the host waits, else on the host."""

    def __init__(self) -> None:
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]] = deque()

    @contextmanager
    def waiting(self, device: torch.device, count: Callable[[float], None]) -> Iterator[None]:
        """Call ``count`` with the milliseconds of the wait inside: of a GPU in a later :meth:`read`."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            before = stream.record_event(torch.cuda.Event(enable_timing=True))
            yield
            self._running.append((before, stream.record_event(torch.cuda.Event(enable_timing=True)), count))
        else:
            start = time.perf_counter()
            yield
            count((time.perf_counter() - start) * 1e3)

    def read(self) -> None:
        """Count the waits that have ended on their GPU."""
        while self._running and self._running[0][1].query():
            before, after, count = self._running.popleft()
            count(before.elapsed_time(after))
