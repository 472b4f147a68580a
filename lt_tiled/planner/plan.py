"""The result of a simulated step: the peak memory and its parts, the FLOPs, and the offload traffic."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lt_tiled.memory import gib
from lt_tiled.planner.simulate import Settings, Simulation


@dataclass(frozen=True)
class Plan:
    """The prediction for one rank, one sequence length and one set of settings."""

    name: str
    """The class of the model."""
    tokens: int
    settings: Settings
    simulation: Simulation

    @property
    def peak(self) -> int:
        """The peak memory in bytes."""
        return self.simulation.peak

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part at the peak, without empty parts."""
        return self.simulation.parts_at(self.simulation.peak_at)

    @property
    def phase(self) -> str:
        """The phase of the step in which the peak occurs."""
        return next(p for p, start in reversed(self.simulation.phases.items()) if start <= self.simulation.peak_at)

    @property
    def place(self) -> str:
        """The module at which the peak occurs."""
        last = max((a for a in self.simulation.allocations if a.born <= self.simulation.peak_at), key=lambda a: a.born)
        return last.place or "the step itself"

    def bandwidth(self, tflops: float) -> float:
        """Return the GB/s that hide offloading behind a forward pass at ``tflops`` TFLOP/s; the backward needs less."""
        moved = self.simulation.offloaded
        seconds = self.simulation.forward_flops / (tflops * 1e12)
        return (moved.cpu_bytes + moved.disk_bytes) / seconds / 1e9 if moved is not None and seconds else 0.0

    def render(self, tflops: float) -> Group:
        """Return a table and text for the terminal, for a device that sustains ``tflops`` TFLOP/s."""
        table = Table(title=f"{self.name}, {self.tokens} tokens" if self.tokens else self.name, title_justify="left")
        table.add_column("memory of", no_wrap=True)
        for title in ("at the peak", "share"):
            table.add_column(title, justify="right", no_wrap=True)
        for part, nbytes in self.parts.items():
            table.add_row(part, gib(nbytes), f"{nbytes / self.peak:.0%}")
        table.add_section()
        table.add_row("predicted peak of a rank", gib(self.peak), "100%")
        run = self.simulation
        lines = [
            f"Settings: {describe(self.settings)}.",
            f"The peak occurs in the {self.phase} phase, at {self.place}.",
            f"FLOPs: {run.flops / 1e12:.3g} TFLOP per step, {run.forward_flops / 1e12:.3g} TFLOP in the forward pass.",
        ]
        if (moved := run.offloaded) is not None and moved.cpu_bytes + moved.disk_bytes:
            lines.append(
                f"Offloaded: {gib(moved.cpu_bytes)} to CPU memory and {gib(moved.disk_bytes)} to disk per step; the"
                f" forward pass hides this at {self.bandwidth(tflops):.1f} GB/s and {tflops:g} TFLOP/s."
            )
        return Group(table, Text("\n".join(lines)))


def describe(settings: Settings) -> str:
    """Return the settings as one line."""
    engine, tiling, policy = settings.engine, settings.tiling, settings.checkpointing
    parts = [engine.name + (f" over {engine.ranks} ranks" if engine.ranks > 1 else ""), "no tiling"]
    if tiling is not None:
        parts[1] = f"tile_tokens={tiling.tile_tokens}" if tiling.tile_tokens else f"num_shards={tiling.num_shards}"
    if settings.loss is not None:
        parts.append("tiled loss")
    parts.append("no activation checkpointing" if policy is None else "activation checkpointing")
    if policy is not None and policy.offload is not None:
        parts.append(f"block inputs offloaded to {policy.offload} except the last {policy.keep_last}")
    return ", ".join(parts)
