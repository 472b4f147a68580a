"""The time of a simulated step on a named GPU, and what bounds it.

NOTE [Predicted time]
A GPU computes matrix products and attention at a share of its peak that was fitted to published steps, and copies at
the nominal bandwidth of each link. Within a phase, copies to CPU memory, to disk and of weights and gradients overlap
with the computation and with each other, so the phase takes as long as the slowest. Ranks that share a sequence wait
for its exchange, so this adds to the computation. ``PRODUCTS``, ``ATTENTION`` and ``CPU_ADAM`` are fitted to the six
rows of an ablation of Arctic Long Sequence Training (arXiv:2506.13996) on 8 x H100, and hold for other GPUs only as
far as their kernels are as good. Its TFLOPS count attention without the causal mask and four forward passes of it; a
causal kernel computes half, and 4.5 forward passes with its recompute, so that its share of the peak is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lt_tiled.planner.ledger import Work
from lt_tiled.planner.simulate import Settings, Simulation

PRODUCTS = 0.40
"""The share of the peak in matrix products, with the norms and activations between them."""
ATTENTION = 0.33
"""The share of the peak in attention kernels, of the FLOPs that a causal mask leaves."""
CPU_ADAM = 1e8
"""Weights that the CPU updates in a second, for each GPU, with the copies of gradients and weights around it."""


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, each in one direction.

    Attributes:
        tflops: The peak of dense bfloat16 products, in TFLOP/s.
        memory: GB/s of the GPU's memory.
        pcie: GB/s to CPU memory.
        nvme: GB/s to the GPU's share of the disks.
        network: GB/s to other GPUs: NVLink within a node.
    """

    tflops: float
    memory: float
    pcie: float
    nvme: float
    network: float


MACHINES = {
    "a100": Machine(312, 2039, 25, 3, 300),
    "h100": Machine(989, 3350, 50, 6, 450),
    "h200": Machine(989, 4800, 50, 6, 450),
    "b200": Machine(2250, 8000, 50, 6, 900),
}
"""Data sheets of the SXM modules; PCIe 4 or 5 with 16 lanes, and one NVMe SSD for each GPU."""


def parse_machine(text: str) -> Machine:
    """Return the machine of text such as ``"h100"`` or ``"h100,pcie=25,network=50"``.

    Raises:
        ValueError: If a name is not known or a number is not positive.
    """
    name, *changes = text.split(",")
    if (machine := MACHINES.get(name.strip().lower())) is None:
        raise ValueError(f"gpu={text!r} is not known: begin it with one of {', '.join(MACHINES)}.")
    known = [field.name for field in fields(Machine)]
    for change in changes:
        key, _, number = change.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if key.strip() not in known or not 0 < value < float("inf"):
            raise ValueError(
                f"gpu={text!r} has {change!r}: write one of {', '.join(known)}, '=' and a positive number of GB/s, or"
                " of TFLOP/s for tflops."
            )
        machine = replace(machine, **{key.strip(): value})
    return machine


@dataclass(frozen=True)
class Phase:
    """The seconds that each resource needs in a phase."""

    compute: float = 0.0
    pcie: float = 0.0
    nvme: float = 0.0
    network: float = 0.0
    """The exchange of sequences, which the computation waits for, and overlapped copies of weights and gradients."""
    waits: float = 0.0
    """The part of ``network`` that the computation waits for."""

    @property
    def seconds(self) -> float:
        """The duration: copies overlap with the computation."""
        return max(self.compute + self.waits, self.pcie, self.nvme, self.network)

    @property
    def bound(self) -> str:
        """The resource that is needed longest."""
        needed = {"compute": self.compute, "PCIe": self.pcie, "NVMe": self.nvme, "network": self.network}
        return max(needed, key=lambda name: needed[name])


@dataclass(frozen=True)
class Speed:
    """The predicted phases of a step."""

    forward: Phase
    backward: Phase
    optimizer: Phase
    accumulate: int = 1
    """Forward and backward passes per step."""

    @property
    def seconds(self) -> float:
        """The duration of a step."""
        return self.accumulate * (self.forward.seconds + self.backward.seconds) + self.optimizer.seconds

    @property
    def bound(self) -> str:
        """What bounds the longest part of a step: a resource, or the optimizer's update."""
        longest = max(self.forward, self.backward, key=lambda phase: phase.seconds)
        return "the optimizer" if self.optimizer.seconds > self.accumulate * longest.seconds else longest.bound


def predict(run: Simulation, settings: Settings, machine: Machine) -> Speed:
    """Return the speed of a simulated step: see NOTE [Predicted time]."""
    engine, each = settings.engine, settings.dtype.itemsize
    sharded = engine.name in ("fsdp", "fsdp2", "zero3")
    away = 1 - 1 / engine.ranks  # the share of a collective that leaves the rank
    weights, trained = run.weights * each, run.trained * each
    gathered = weights * away if sharded else 0.0
    reduced = trained * away * (2 if engine.name == "ddp" else 1)
    loaded = weights / engine.ranks if engine.offload_weights else 0.0
    moved = run.offloaded
    disk = moved.disk_bytes if moved is not None else 0
    copied = disk + (moved.cpu_bytes if moved is not None else 0)

    def phase(work: Work, network: float) -> Phase:
        waits = work.exchanged * (1 - 1 / settings.sharing) / machine.network / 1e9
        return Phase(
            compute=(work.products / PRODUCTS + work.attention / ATTENTION) / machine.tflops / 1e12,
            pcie=(copied + loaded) / machine.pcie / 1e9,
            nvme=disk / machine.nvme / 1e9,
            network=waits + network / machine.network / 1e9,
            waits=waits,
        )

    if engine.offload_optimizer:
        step = Phase(compute=run.trained / engine.ranks / CPU_ADAM)
    else:
        parts = run.parts_at(run.phases["optimizer"])
        state = sum(parts.get(part, 0) for part in ("weights", "optimizer"))
        step = Phase(compute=(2 * state + parts.get("gradients", 0)) / machine.memory / 1e9)  # read and written
    if engine.name in ("zero1", "zero2"):
        step = replace(step, network=trained * away / machine.network / 1e9)
    return Speed(phase(run.forward, gathered), phase(run.backward, gathered + reduced), step, settings.accumulate)
