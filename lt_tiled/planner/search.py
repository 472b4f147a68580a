"""The longest sequence that fits, and the cheapest settings that fit a length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

from lt_tiled._log import warn_once
from lt_tiled._renamed import deprecated
from lt_tiled.errors import DoesNotFitError, NothingFoundError
from lt_tiled.loss.transformers import find_losses, untiled_losses
from lt_tiled.planner.job import Job
from lt_tiled.planner.plan import Plan, describe, gib
from lt_tiled.planner.simulate import Settings
from lt_tiled.policies import Checkpointing, Tiling
from lt_tiled.tiling.layout import MIN_TILE_TOKENS

__getattr__ = deprecated(__name__, {"DoesNotFit": "lt_tiled.errors.DoesNotFitError"})

LIMIT = 2**24
"""No search goes beyond this many tokens: where a step's memory hardly depends on the length, something else ends
it."""
CLOSE = 0.02
"""A search for a length ends within this share of the longest."""


def plan(job: Job, tokens: int | None = None, settings: Settings | None = None, whole_loss: bool = False) -> Plan:
    """The plan of a job, for a length and settings that are not its own.

    Args:
        job: What is trained.
        tokens: Of each sequence, if not those of its batch.
        settings: If not those of the job.
        whole_loss: Let a module that tiles its loss itself, as ``CausalLM`` does, not do it.

    Raises:
        SimulationError: With the operation that needs values.
    """
    chosen = settings or job.settings
    _warn_of_positions(job, tokens or job.tokens)
    with untiled_losses(job.module) if whole_loss else nullcontext():
        return Plan(job.name, tokens or job.tokens, chosen, job.simulate(tokens, chosen))


def _warn_of_positions(job: Job, tokens: int) -> None:
    for module in job.module.modules():
        most = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if isinstance(most, int) and tokens > most:
            name = type(module).__name__
            warn_once(
                f"positions {most}",
                f"{name} says that it has {most} positions, fewer than the {tokens} tokens of a plan.",
            )
            return


def longest(
    job: Job, memory: int, settings: Settings | None = None, granule: int = 256, tokens: int | None = None
) -> Plan:
    """The longest sequence whose step fits.

    Args:
        job: What is trained.
        memory: Bytes of a device.
        settings: If not those of the job.
        granule: The length is a multiple of it.
        tokens: Where to begin, if not at the length of the job.

    Raises:
        DoesNotFitError: If not even the shortest fits.
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
        # Memory is nearly linear in the length between two kinks: go to where the line meets the limit, at most eight
        # times as far.
        guess = low + int((memory - best.peak) / slope) if slope > 0 else 8 * low
        bound = min(8 * low, LIMIT) if high is None else high - granule
        tokens = max(low + granule, min(guess, bound) // granule * granule)
        if high is not None and tokens >= high:
            return best


def cheapest(job: Job, memory: int, tokens: int) -> Plan:
    """The settings under which a length fits that cost least time: in the order of :func:`ladder`, and then the fewest
    tiles.

    Args:
        job: What is trained.
        memory: Bytes of a device.
        tokens: Of each sequence.

    Raises:
        DoesNotFitError: If no settings do.
    """
    least = None
    for settings in ladder(job):
        found = plan(job, tokens, _finest(settings, tokens))
        if found.peak <= memory:
            return _coarsest(job, memory, tokens, settings, found)
        least = min((p for p in (least, found) if p is not None), key=lambda p: p.peak)
    assert least is not None
    raise DoesNotFitError(
        f"{tokens} tokens do not fit into {gib(memory)} with any settings: the least is {gib(least.peak)}, with"
        f" {describe(least.settings)}. Give more devices, more memory or a shorter length."
    )


def ladder(job: Job) -> Iterator[Settings]:
    """Settings in the order of the time that they cost: nothing, the loss in tiles, recompute, tiles, and inputs sent
    away.
    """
    loss = _has_loss(job)
    steps: list[tuple[Tiling | None, Checkpointing | None]] = [(None, None)]
    alone = Tiling(targets=[], loss=True) if loss else None
    steps += [(alone, None)] if loss else []
    steps += [(alone, Checkpointing())]
    tiled = Tiling(loss=loss)
    steps += [(tiled, Checkpointing()), (tiled, Checkpointing(offload="cpu")), (tiled, Checkpointing(offload="disk"))]
    for tiling, checkpointing in steps:
        yield replace(job.settings, tiling=tiling, checkpointing=checkpointing)


def _has_loss(job: Job) -> bool:
    try:
        return bool(find_losses(job.module))
    except NothingFoundError:
        return False


def _finest(settings: Settings, tokens: int) -> Settings:
    """With tiles that are as small as they are efficient."""
    if settings.tiling is None or settings.tiling.targets == []:
        return settings
    return replace(settings, tiling=replace(settings.tiling, num_shards=max(1, tokens // MIN_TILE_TOKENS)))


def _coarsest(job: Job, memory: int, tokens: int, settings: Settings, found: Plan) -> Plan:
    """With the fewest tiles that fit, in powers of two."""
    if settings.tiling is None or settings.tiling.targets == []:
        return found
    shards = 2
    while shards < tokens // MIN_TILE_TOKENS:
        fewer = plan(job, tokens, replace(settings, tiling=replace(settings.tiling, num_shards=shards)))
        if fewer.peak <= memory:
            return fewer
        shards *= 2
    return found
