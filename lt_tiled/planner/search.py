"""The longest sequence that fits, and the fastest settings with which a sequence length fits."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace

from lt_tiled._log import warn_once
from lt_tiled._renamed import deprecated
from lt_tiled.errors import DoesNotFitError, NothingFoundError
from lt_tiled.loss.transformers import find_losses, untiled_losses
from lt_tiled.memory import gib
from lt_tiled.planner.job import Job
from lt_tiled.planner.plan import Plan, describe
from lt_tiled.planner.simulate import Settings
from lt_tiled.policies import Checkpointing, LossShards, Tiling
from lt_tiled.tiling.layout import MIN_TILE_TOKENS

__getattr__ = deprecated(__name__, {"DoesNotFit": "lt_tiled.errors.DoesNotFitError"})

LIMIT = 2**24
"""The longest sequence of a search: if such a step fits, its memory hardly depends on the sequence length."""
CLOSE = 0.02
"""A search ends within this share of the longest sequence."""


def plan(job: Job, tokens: int | None = None, settings: Settings | None = None, full_logits: bool = False) -> Plan:
    """Return the plan of a job, also for another sequence length and other settings.

    Args:
        job: What is trained.
        tokens: The sequence length; by default that of the batch.
        settings: By default those of the job.
        full_logits: Do not tile the loss of a module that tiles it itself, such as ``CausalLM``.

    Raises:
        SimulationError: If an operation needs values.
    """
    settings, length = settings or job.settings, tokens or job.tokens
    for module in job.module.modules():
        most = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if isinstance(most, int) and length > most:
            name = type(module).__name__
            warn_once(f"positions {most}", f"{name} has {most} positions, fewer than the {length} tokens of a plan.")
            break
    with untiled_losses(job.module) if full_logits else nullcontext():
        return Plan(job.name, length, settings, job.simulate(tokens, settings))


def longest(
    job: Job, memory: int, settings: Settings | None = None, granule: int = 256, tokens: int | None = None
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
    best, low, high = plan(job, granule, settings), granule, None
    if best.peak > memory:
        raise DoesNotFitError(
            f"{granule} tokens already take {gib(best.peak)}, more than {gib(memory)}: give more memory or devices."
        )
    slope, tokens = 0.0, max((tokens or job.tokens) // granule * granule, 2 * granule)
    while True:
        tried = plan(job, tokens, settings)
        if tried.peak <= memory:
            slope = (tried.peak - best.peak) / (tokens - low) or slope
            best, low = tried, tokens
        else:
            slope, high = (tried.peak - best.peak) / (tokens - low), tokens
        if low >= LIMIT or (high is not None and high - low <= max(granule, int(CLOSE * low))):
            return best
        # Memory is nearly linear in the sequence length: go to where the line meets the limit, at most eight times as
        # far.
        guess = low + int((memory - best.peak) / slope) if slope > 0 else 8 * low
        bound = min(8 * low, LIMIT) if high is None else high - granule
        tokens = max(low + granule, min(guess, bound) // granule * granule)
        if high is not None and tokens >= high:
            return best


def cheapest(job: Job, memory: int, tokens: int) -> Plan:
    """Return the fastest plan with which ``tokens`` fit into ``memory`` bytes: the first of :func:`ladder`.

    It uses the fewest tiles that fit.

    Raises:
        DoesNotFitError: If no settings fit.
    """
    tried: list[Plan] = []
    finest = max(1, tokens // MIN_TILE_TOKENS)
    for settings in ladder(job).values():
        tried.append(plan(job, tokens, _with_shards(settings, finest)))
        if tried[-1].peak <= memory:
            shards = 2
            while shards < finest and settings.tiling is not None:
                fewer = plan(job, tokens, _with_shards(settings, shards))
                if fewer.peak <= memory:
                    return fewer
                shards *= 2
            return tried[-1]
    least = min(tried, key=lambda found: found.peak)
    raise DoesNotFitError(
        f"{tokens} tokens do not fit into {gib(memory)} with any settings: the least is {gib(least.peak)}, with"
        f" {describe(least.settings)}. Give more devices, more memory or a shorter sequence length."
    )


def ladder(job: Job) -> dict[str, Settings]:
    """Return settings by name, from the fastest to the slowest; each adds something to the one before it."""
    loss: LossShards | None = None
    with suppress(NothingFoundError):
        loss = "auto" if find_losses(job.module) else None
    plain = replace(job.settings, tiling=None, checkpointing=None, loss=None)
    tiled = replace(plain, loss=loss, tiling=Tiling())
    return {
        "without lt_tiled": plain,
        **({} if loss is None else {"tiled loss": replace(plain, loss=loss)}),
        "+ activation checkpointing": replace(plain, loss=loss, checkpointing=Checkpointing()),
        "+ tiled MLP": replace(tiled, checkpointing=Checkpointing()),
        "+ offload to CPU memory": replace(tiled, checkpointing=Checkpointing(offload="cpu")),
        "+ offload to disk": replace(tiled, checkpointing=Checkpointing(offload="disk")),
    }


def _with_shards(settings: Settings, num_shards: int) -> Settings:
    """Return settings with another number of tiles, or the same ones if they tile no modules."""
    if settings.tiling is None:
        return settings
    return replace(settings, tiling=replace(settings.tiling, num_shards=num_shards))
