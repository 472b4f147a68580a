"""The time of a simulated step on a named GPU, and what bounds it.

NOTE [Predicted time]
A GPU computes matrix products and attention at a share of its peak, and copies at the nominal bandwidth of each link.
Within a phase, copies overlap with the computation and with each other, so the phase takes as long as the slowest.
What ranks with a shared sequence exchange is not counted. ``PRODUCTS``, ``ATTENTION`` and ``CPU_ADAM`` are fitted to
the six rows of an ablation of Arctic Long Sequence Training (arXiv:2506.13996) on 8 x H100. Its TFLOPS count attention
without the causal mask, of which a causal kernel computes half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lt_tiled.planner.engines import elements, trained_weights
from lt_tiled.planner.ledger import Work
from lt_tiled.planner.simulate import Plan

PRODUCTS = 0.40
"""The share of the peak in matrix products, with the norms and activations between them."""
ATTENTION = 0.33
"""The share of the peak in attention kernels, of the FLOPs that a causal mask leaves."""
CPU_ADAM = 1e8
"""Weights that the CPU updates in a second, for each GPU, with the copies of gradients and weights around it."""


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, in GB/s in one direction."""

    tflops: float  # the peak of dense bfloat16 products, in TFLOP/s
    memory: float  # of the GPU
    pcie: float  # to CPU memory
    nvme: float  # to the GPU's share of the disks
    network: float  # to other GPUs: NVLink within a node


GPU = Literal["a100", "h100", "h200", "b200"]
MACHINES: dict[str, Machine] = {
    "a100": Machine(312, 2039, 25, 3, 300),
    "h100": Machine(989, 3350, 50, 6, 450),
    "h200": Machine(989, 4800, 50, 6, 450),
    "b200": Machine(2250, 8000, 50, 6, 900),
}
"""Data sheets of the SXM modules; PCIe 4 or 5 with 16 lanes, and one NVMe SSD for each GPU."""


@dataclass(frozen=True)
class Speed:
    """The predicted seconds of a step, and what bounds it."""

    seconds: float
    bound: str
    tokens_per_second: float  # of all ranks


def predict(plan: Plan, machine: Machine) -> Speed:
    """Return the speed of a simulated step: see NOTE [Predicted time]."""
    job = plan.job
    engine = job.engine
    weights = elements(job.module.parameters())
    trained = elements(trained_weights(job.module))
    # 1. Bytes that the engine exchanges: the share of its collectives that leaves a rank.
    away = (engine.mixed or job.dtype).itemsize * (1 - 1 / engine.ranks)
    reduced = trained * away
    gathered = 0.0
    if engine.name in ("fsdp", "fsdp2", "zero3"):
        gathered = weights * away
    elif engine.name == "ddp":
        reduced *= 2
    # 2. Bytes that are offloaded in each pass. Those to a disk pass PCIe as well.
    disk = plan.offloaded.disk_bytes
    moved = plan.offloaded.cpu_bytes + disk
    if engine.offloads("param"):
        moved += weights * job.dtype.itemsize // engine.ranks

    def needs(work: Work, exchanged: float) -> dict[str, float]:
        """Return the seconds for which a pass needs each resource."""
        return {
            "compute": (work["products"] / PRODUCTS + work["attention"] / ATTENTION) / machine.tflops / 1e12,
            "PCIe": moved / machine.pcie / 1e9,
            "NVMe": disk / machine.nvme / 1e9,
            "network": exchanged / machine.network / 1e9,
        }

    forward = needs(plan.forward, gathered)
    backward = needs(plan.backward, gathered + reduced)
    # 3. The optimizer reads and writes its state and the weights, and reads the gradients.
    parts = plan.parts_at(plan.phases["optimizer"])
    state = parts.get("weights", 0) + parts.get("optimizer", 0)
    update = (2 * state + parts.get("gradients", 0)) / machine.memory / 1e9
    if engine.offloads("optimizer"):
        update = trained / engine.ranks / CPU_ADAM
    if engine.name in ("zero1", "zero2"):  # these gather the updated weights
        update = max(update, trained * away / machine.network / 1e9)
    # 4. The slowest bounds its pass, and the slowest of all the step.
    slowest = {"the optimizer": update / job.accumulate}
    for resource in forward:
        slowest[resource] = max(forward[resource], backward[resource])
    seconds = job.accumulate * (max(forward.values()) + max(backward.values())) + update
    tokens = plan.tokens * plan.sequences * job.accumulate * engine.ranks
    if job.sequence_parallel:
        tokens //= job.sequence_parallel.size
    bound = max(slowest, key=lambda resource: slowest[resource])
    return Speed(seconds, bound, tokens / seconds)
