"""Plans: what a simulated step takes, the longest sequence that fits, and the cheapest settings with which one fits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from lt_tiled._log import progress
from lt_tiled.errors import DoesNotFitError, NothingFoundError
from lt_tiled.loss.transformers import find_losses
from lt_tiled.memory import gib
from lt_tiled.planner.job import Job
from lt_tiled.planner.simulate import STATE, Settings, Simulation
from lt_tiled.planner.speed import GPU, MACHINES, Machine, Speed, predict
from lt_tiled.policies import ActivationCheckpointing, LossShards, Tiling
from lt_tiled.training_step.step import shape_of

LIMIT = 2**27
"""The longest sequence of a search: if such a step fits, its memory hardly depends on the sequence length."""
CLOSE = 0.02
"""A search ends within this share of the longest sequence."""


@dataclass(frozen=True)
class Plan:
    """The prediction for one rank, one sequence length and one set of settings."""

    name: str
    """The class of the module."""
    tokens: int
    settings: Settings
    simulation: Simulation
    sequences: int = 1
    """The batch size of a rank, or of the ranks that share a sequence."""

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

    def speed(self, machine: Machine) -> Speed:
        """Return the predicted speed of a step."""
        return predict(self.simulation, self.settings, machine)

    def tokens_per_second(self, machine: Machine) -> float:
        """Return the tokens of all ranks in a second."""
        groups = self.settings.engine.ranks / self.settings.sharing
        return self.tokens * self.sequences * self.settings.accumulate * groups / self.speed(machine).seconds

    def render(self, memory: int | None = None, gpu: GPU = "h100") -> str:
        """Return text for the terminal; with the ``memory`` of a device in bytes, also whether it fits."""
        run, speed = self.simulation, self.speed(MACHINES[gpu])
        lines = [f"{self.name}, {self.tokens} tokens"]
        for part, nbytes in {**self.parts, "predicted peak of a rank": self.peak}.items():
            lines.append(f"  {part:24} {gib(nbytes):>12} {nbytes / self.peak:5.0%}")
        lines.append(f"Settings: {describe(self.settings)}.")
        lines.append(f"The peak occurs in the {self.phase} phase.")
        flops = f"{run.flops / 1e12:.3g} TFLOP per step, {run.forward.flops / 1e12:.3g} TFLOP in the forward pass"
        lines.append(f"FLOPs: {flops}.")
        if (moved := run.offloaded) is not None:
            moved_to = f"{gib(moved.cpu_bytes)} to CPU memory and {gib(moved.disk_bytes)} to disk"
            lines.append(f"Offloaded: {moved_to} per step.")
        lines.append(
            f"Speed on {gpu}: {self.tokens_per_second(MACHINES[gpu]):,.0f} tokens per second on"
            f" {self.settings.engine.ranks} of them, {speed.seconds:.3g} s per step, bound by {speed.bound}."
        )
        if memory is not None and self.peak <= memory:
            lines.append(f"It fits into {gib(memory)}, with {gib(memory - self.peak)} to spare.")
        elif memory is not None:
            lines.append(f"It takes {gib(self.peak - memory)} more than {gib(memory)}.")
        return "\n".join(lines)


def describe(settings: Settings) -> str:
    """Return the settings as one line: the engine, and policies with the fields that are not their defaults."""
    engine = settings.engine
    parts = [engine.name + (f" over {engine.ranks} ranks" if engine.ranks > 1 else "")]
    policies: list[Any] = [settings.tiling, settings.activation_checkpointing, settings.sequence_parallel]
    for policy in policies:
        if policy is not None:
            values = [(field, getattr(policy, field.name)) for field in fields(policy)]
            changed = [f"{field.name}={value!r}" for field, value in values if value != field.default]
            parts.append(f"{type(policy).__name__}({', '.join(changed)})")
    return ", ".join([*parts, *(["tiled loss"] if settings.loss else [])])


def plan(job: Job, tokens: int | None = None, settings: Settings | None = None) -> Plan:
    """Return the plan of a job, also for another sequence length and other settings.

    Args:
        job: What is trained.
        tokens: The sequence length; by default that of the batch.
        settings: By default those of the job.

    Raises:
        SimulationError: If an operation needs values.
    """
    settings, length = settings or job.settings, tokens or job.tokens
    with progress(f"Planning {length} tokens, {describe(settings)}"):
        simulation = job.simulate(tokens, settings)
    return Plan(type(job.module).__name__, length, settings, simulation, shape_of(job.batch)[0])


def longest(
    job: Job,
    memory: int,
    settings: Settings | None = None,
    granule: int = 256,
    tokens: int | None = None,
) -> Plan:
    """Return the plan of the longest sequence whose step fits.

    Args:
        job: What is trained.
        memory: The memory of a device in bytes.
        settings: By default those of the job.
        granule: The sequence length is a multiple of it.
        tokens: The first sequence length to try; by default that of the job.

    Raises:
        DoesNotFitError: If not even the shortest sequence fits.
    """
    low = plan(job, granule, settings)
    if low.peak > memory:
        raise DoesNotFitError(
            f"{granule} tokens already take {gib(low.peak)}, more than {gib(memory)}: use more memory or devices."
        )
    high, guess, tries = LIMIT, float(tokens or job.tokens), 0
    while high - low.tokens > (close := max(granule, int(CLOSE * low.tokens))):
        # A multiple of the granule between what fits and what does not.
        guess = min(max(guess, low.tokens + close), high - granule)
        found = plan(job, int(guess) // granule * granule, settings)
        if found.peak <= memory:
            low = found
        else:
            high = found.tokens
        # What grows with the tokens grows on from the latest plan. If it does not grow that way, halve the interval.
        growing = sum(nbytes for part, nbytes in found.parts.items() if part not in STATE) / found.tokens
        guess = min(found.tokens + (memory - found.peak) / max(growing, 1e-9), 64 * low.tokens)
        if high < LIMIT and tries % 3 == 2:
            guess = (low.tokens + high) / 2
        tries += 1
    return low


def cheapest(job: Job, memory: int, tokens: int) -> Plan:
    """Return the plan of the first settings of :func:`ladder` that fit into ``memory`` bytes.

    Raises:
        DoesNotFitError: If none fit.
    """
    tried = list[Plan]()
    for settings in ladder(job):
        tried.append(plan(job, tokens, settings))
        if tried[-1].peak <= memory:
            return tried[-1]
    least = min(tried, key=lambda found: found.peak)
    raise DoesNotFitError(
        f"{tokens} tokens do not fit into {gib(memory)} with any settings: the least is {gib(least.peak)}, with"
        f" {describe(least.settings)}. Give more devices, more memory or a shorter sequence length."
    )


def ladder(job: Job) -> list[Settings]:
    """Return settings in the order of the time that they cost; tiles cost none, but for the host."""
    loss: LossShards | None = None
    with suppress(NothingFoundError):
        loss = "auto" if find_losses(job.module) else None
    plain = replace(job.settings, tiling=None, activation_checkpointing=None, loss=None)
    rungs = [plain] if loss is None else [plain, replace(plain, loss=loss)]
    for keep in ("attention", None):
        for tiling in (None, Tiling()):
            policy = ActivationCheckpointing(keep=keep)
            rungs.append(replace(plain, loss=loss, tiling=tiling, activation_checkpointing=policy))
    for offload in ("cpu", "disk"):
        policy = ActivationCheckpointing(offload=offload)
        rungs.append(replace(plain, loss=loss, tiling=Tiling(), activation_checkpointing=policy))
    return rungs
