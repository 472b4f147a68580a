"""How much was offloaded, in one step or in several."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lt_tiled.memory import gib


@dataclass
class OffloadStats:
    """Bytes over the steps that it covers."""

    cpu_bytes: int = 0
    """Bytes moved to CPU memory."""
    disk_bytes: int = 0
    """Bytes written to the disk, which wear an SSD."""
    over_budget_bytes: int = 0
    """Bytes that stayed on the device because the budget had no room."""

    def __add__(self, other: OffloadStats) -> OffloadStats:
        return OffloadStats(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def metrics(self) -> dict[str, float]:
        return {f"lt_tiled/offload_{name}": float(value) for name, value in asdict(self).items()}

    def describe(self, steps: int, seconds: float | None = None) -> list[str]:
        """Return lines of text about a run of ``steps`` steps, with the SSD wear if its duration is given."""
        if not self.cpu_bytes + self.disk_bytes + self.over_budget_bytes:
            return ["nothing was offloaded: inputs under 1 MiB, and the last keep_last ones, stay on the device"]
        per_step = max(steps, 1)
        cpu, disk = (gib(nbytes / per_step) for nbytes in (self.cpu_bytes, self.disk_bytes))
        lines = [f"offloaded per step: {cpu} to CPU memory, {disk} to disk"]
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
