"""What offloading did: in one step, and in all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from lt_tiled.memory import gib


@dataclass
class OffloadStats:
    """Sums since the last reset; bytes and milliseconds."""

    cpu_bytes: int = 0
    """Moved to RAM."""
    disk_bytes: int = 0
    """Written to the disk: what wears an SSD."""
    kept_bytes: int = 0
    """Left where they were for want of room."""
    from_memory: int = 0
    """Boundaries handed back before they had left."""
    prefetch_hits: int = 0
    """Boundaries that were back when they were asked for."""
    prefetch_misses: int = 0
    """Boundaries that had to be waited for."""
    stalled_ms: float = 0.0
    """The time spent waiting: for boundaries, and for room to send more."""

    def add(self, other: OffloadStats) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def metrics(self, prefix: str = "offload/") -> dict[str, float]:
        """The figures by name, for a logger."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items()}

    def describe(self, steps: int, seconds: float | None = None) -> list[str]:
        """Lines for people, about a run of that many steps; with its duration, what it means for an SSD."""
        if not self.cpu_bytes + self.disk_bytes + self.kept_bytes:
            return [
                "nothing was offloaded: inputs smaller than min_bytes, and those of the keep_last last blocks, stay"
            ]
        per_step = max(steps, 1)
        asked = self.prefetch_hits + self.prefetch_misses
        lines = [
            f"offloaded per step: {gib(self.cpu_bytes / per_step)} to RAM, {gib(self.disk_bytes / per_step)} to disk",
            f"back in time: {self.prefetch_hits} of {asked}; asked for while still on the way out: {self.from_memory}",
            f"stalled: {self.stalled_ms / per_step:.1f} ms a step",
        ]
        if self.kept_bytes:
            lines.append(f"left on the device for want of room: {gib(self.kept_bytes / per_step)} a step")
        if self.disk_bytes:
            lines.append(f"written to disk in all: {gib(self.disk_bytes)}")
            if seconds:
                lines.append(
                    f"SSD wear at this rate: {self.disk_bytes / seconds * 86400 / 1e12:.1f} TB a day, to hold against the drive's TBW"
                )
        return lines
