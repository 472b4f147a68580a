"""What a simulated step says: the peak and what makes it, the work, and the traffic."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lt_tiled.planner.simulate import Settings, Simulation
from lt_tiled.policies import Checkpointing, Tiling


@dataclass(frozen=True)
class Plan:
    """The prediction for one length and one set of settings, of one rank."""

    name: str
    """Of the model."""
    tokens: int
    """Of each sequence."""
    settings: Settings
    simulation: Simulation

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.simulation.peak

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part at the peak, those that are none left out."""
        return self.simulation.parts_at(self.simulation.peak_at)

    @property
    def phase(self) -> str:
        """In which phase of the step the peak stands."""
        return next(p for p, start in reversed(self.simulation.phases.items()) if start <= self.simulation.peak_at)

    @property
    def place(self) -> str:
        """At which module it stands."""
        last = max((a for a in self.simulation.allocations if a.born <= self.simulation.peak_at), key=lambda a: a.born)
        return last.place or "the step itself"

    def bandwidth(self, tflops: float) -> float:
        """The GB/s that hide what is sent away behind the forward, at a rate of computation; the way back needs less.

        Args:
            tflops: What the device sustains, in 10**12 operations a second.
        """
        moved = self.simulation.offloaded
        seconds = self.simulation.forward_flops / (tflops * 1e12)
        return (moved.cpu_bytes + moved.disk_bytes) / seconds / 1e9 if moved is not None and seconds else 0.0

    def render(self, tflops: float) -> Group:
        """For people.

        Args:
            tflops: What the device sustains, in 10**12 operations a second.
        """
        table = Table(title=f"{self.name}, {self.tokens} tokens" if self.tokens else self.name, title_justify="left")
        table.add_column("what holds memory", no_wrap=True)
        table.add_column("at the peak", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        for part, nbytes in self.parts.items():
            table.add_row(part, gib(nbytes), f"{nbytes / self.peak:.0%}")
        table.add_section()
        table.add_row("predicted peak of a rank", gib(self.peak), "100%")
        run = self.simulation
        lines = [
            f"with {describe(self.settings)}",
            f"The peak stands in the {self.phase}, at {self.place}.",
            f"{run.flops / 1e12:.3g} TFLOP a step, {run.forward_flops / 1e12:.3g} of them in the forward",
        ]
        if run.offloaded is not None and run.offloaded.cpu_bytes + run.offloaded.disk_bytes:
            moved = run.offloaded
            lines.append(
                f"offloaded: {gib(moved.cpu_bytes)} to RAM and {gib(moved.disk_bytes)} to disk a step, hidden behind the forward by"
                f" {self.bandwidth(tflops):.1f} GB/s at {tflops:g} TFLOP/s"
            )
        return Group(table, Text("\n".join(lines)))


def describe(settings: Settings) -> str:
    """The settings in a line."""
    engine = (
        settings.engine.name
        if settings.engine.ranks == 1
        else f"{settings.engine.name} over {settings.engine.ranks} ranks"
    )
    return f"{engine}, {_tiling(settings.tiling)}, {_checkpointing(settings.checkpointing)}"


def _tiling(tiling: Tiling | None) -> str:
    if tiling is None:
        return "no tiles"
    size = f"tiles of {tiling.tile_tokens} tokens" if tiling.tile_tokens else f"num_shards={tiling.num_shards}"
    words = [*([] if tiling.targets == [] else [size]), *(["tiled loss"] if tiling.loss else [])]
    return " and ".join(words)


def _checkpointing(policy: Checkpointing | None) -> str:
    if policy is None:
        return "no checkpointing"
    return (
        "checkpointing"
        if policy.offload is None
        else f"checkpointing with inputs on {policy.offload}, all but the last {policy.keep_last}"
    )


def gib(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
