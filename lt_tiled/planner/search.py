"""Plans: what a simulated step takes, the longest sequence that fits, and the cheapest settings with which one fits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace

from lt_tiled.errors import DoesNotFitError, NothingFoundError
from lt_tiled.loss.transformers import find_losses
from lt_tiled.memory import gib
from lt_tiled.planner.job import Job
from lt_tiled.planner.simulate import Plan, Settings, simulate
from lt_tiled.planner.speed import GPU, MACHINES, predict
from lt_tiled.policies import ActivationCheckpointing, LossShards, Tiling
from lt_tiled.training_step.step import with_length

LIMIT = 2**27
"""The longest sequence of a search: if such a step fits, its memory hardly depends on the sequence length."""
CLOSE = 0.02
"""A search ends within this share of the longest sequence."""


def plan(job: Job, tokens: int | None = None, settings: Settings | None = None) -> Plan:
    """Return the plan of a job; by default for its own sequence length and settings.

    Raises:
        SimulationError: If an operation needs values, or the module optimizes manually.
        ValueError: If the batch has no sequences and ``tokens`` is given.
    """
    settings = settings or job.settings
    batch = job.batch if tokens is None else with_length(job.batch, tokens)
    return simulate(job.module, batch, settings)


def longest(
    job: Job, memory: int, settings: Settings | None = None, granule: int = 256, tokens: int | None = None
) -> Plan:
    """Return the plan of the longest sequence, a multiple of ``granule``, whose step fits into ``memory`` bytes.

    ``tokens`` is the first sequence length to try.

    Raises:
        DoesNotFitError: If not even the shortest sequence fits.
    """
    low = plan(job, granule, settings)
    if low.peak > memory:
        raise DoesNotFitError(
            f"{granule} tokens already take {gib(low.peak)}, more than {gib(memory)}: use more memory or devices."
        )
    high = LIMIT
    length = tokens or job.tokens
    while high - low.tokens > max(granule, CLOSE * low.tokens):
        # A multiple of the granule between what fits and what does not.
        length = min(max(length // granule * granule, low.tokens + granule), high - granule)
        found = plan(job, length, settings)
        if found.peak <= memory:
            low = found
        else:
            high = length
        # Four times as long until a length does not fit, then halve what is left.
        length = 4 * length if high == LIMIT else (low.tokens + high) // 2
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
    plain = replace(job.settings, tiling=None, activation_checkpointing=None, loss=None)
    rungs = [plain]
    loss: LossShards | None = None
    with suppress(NothingFoundError):
        if find_losses(job.module):
            loss = "auto"
            rungs.append(replace(plain, loss=loss))
    for keep in ("attention", None):
        for tiling in (None, Tiling()):
            policy = ActivationCheckpointing(keep=keep)
            rungs.append(replace(plain, loss=loss, tiling=tiling, activation_checkpointing=policy))
    for offload in ("cpu", "disk"):
        policy = ActivationCheckpointing(offload=offload)
        rungs.append(replace(plain, loss=loss, tiling=Tiling(), activation_checkpointing=policy))
    return rungs


def render(found: Plan, memory: int | None = None, gpu: GPU = "h100") -> str:
    """Return a plan as text; with the ``memory`` of a device in bytes, also whether it fits."""
    lines = [f"{found.name}, {found.tokens} tokens"]
    for part, nbytes in (found.parts | {"predicted peak of a rank": found.peak}).items():
        lines.append(f"  {part:24} {gib(nbytes):>12} {nbytes / found.peak:5.0%}")
    lines.append(f"Settings: {describe(found.settings)}.")
    lines.append(f"The peak occurs in the {found.phase} phase.")
    forward = found.forward.total() / 1e12
    lines.append(f"FLOPs: {found.flops / 1e12:.3g} TFLOP per step, {forward:.3g} TFLOP in the forward pass.")
    moved = found.offloaded
    if moved.cpu_bytes or moved.disk_bytes:
        lines.append(f"Offloaded: {gib(moved.cpu_bytes)} to CPU memory and {gib(moved.disk_bytes)} to disk per step.")
    speed = predict(found, MACHINES[gpu])
    lines.append(
        f"Speed on {gpu}: {speed.tokens_per_second:,.0f} tokens per second on {found.settings.engine.ranks} of them,"
        f" {speed.seconds:.3g} s per step, bound by {speed.bound}."
    )
    if memory is not None and found.peak <= memory:
        lines.append(f"It fits into {gib(memory)}, with {gib(memory - found.peak)} to spare.")
    elif memory is not None:
        lines.append(f"It takes {gib(found.peak - memory)} more than {gib(memory)}.")
    return "\n".join(lines)


def describe(settings: Settings) -> str:
    """Return the settings as one line: the engine, and policies with the fields that are not their defaults."""
    parts: list[str] = [settings.engine.name]
    if settings.engine.ranks > 1:
        parts = [f"{settings.engine.name} over {settings.engine.ranks} ranks"]
    for policy in (settings.tiling, settings.activation_checkpointing, settings.sequence_parallel):
        if policy is not None:
            changed = list[str]()
            for option in fields(policy):
                value = getattr(policy, option.name)
                if value != option.default:
                    changed.append(f"{option.name}={value!r}")
            parts.append(f"{type(policy).__name__}({', '.join(changed)})")
    if settings.loss:
        parts.append("tiled loss")
    return ", ".join(parts)
