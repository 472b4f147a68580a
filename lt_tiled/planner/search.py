"""Search plans: for the longest sequence that fits, and for the cheapest settings with which one fits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from lt_tiled.errors import DoesNotFitError, NothingFoundError
from lt_tiled.loss.transformers import find_losses
from lt_tiled.memory import gib
from lt_tiled.planner.job import Job
from lt_tiled.planner.simulate import Plan, Settings, simulate
from lt_tiled.policies import ActivationCheckpointing, Tiling
from lt_tiled.training_step.step import with_length

SHORTEST = 256
"""The shortest sequence of a search. All of its sequence lengths are multiples of it."""
LIMIT = 2**27
"""The longest sequence of a search: if such a step fits, its memory hardly depends on the sequence length."""
CLOSE = 0.02
"""A search ends within this share of the longest sequence."""
_LADDER = (
    (None, ActivationCheckpointing(keep="attention")),
    (Tiling(), ActivationCheckpointing(keep="attention")),
    (None, ActivationCheckpointing()),
    (Tiling(), ActivationCheckpointing()),
    (Tiling(), ActivationCheckpointing(offload="cpu")),
    (Tiling(), ActivationCheckpointing(offload="disk")),
)
"""Policies in the order of the time that they cost. Tiles cost none, but for the host."""


def plan(job: Job, tokens: int | None = None, settings: Settings | None = None) -> Plan:
    """Return the plan of a job; by default for its own sequence length and settings.

    Raises:
        SimulationError: If an operation needs values, or the module optimizes manually.
        ValueError: If the batch has no sequences and ``tokens`` is given.
    """
    settings = settings or job.settings
    batch = job.batch if tokens is None else with_length(job.batch, tokens)
    return simulate(job.module, batch, settings)


def longest(job: Job, memory: int, tokens: int | None = None) -> Plan:
    """Return the plan of the longest sequence, within 2 %, whose step fits into ``memory`` bytes.

    ``tokens`` is the first sequence length to try.

    Raises:
        DoesNotFitError: If not even the shortest sequence fits.
    """
    low = plan(job, SHORTEST)
    if low.peak > memory:
        raise DoesNotFitError(
            f"{SHORTEST} tokens already take {gib(low.peak)}, more than {gib(memory)}: use more memory or devices."
        )
    high = LIMIT
    length = tokens or job.tokens
    while high - low.tokens > max(SHORTEST, CLOSE * low.tokens):
        # 1. Try a multiple between what fits and what does not.
        length = min(max(length // SHORTEST * SHORTEST, low.tokens + SHORTEST), high - SHORTEST)
        found = plan(job, length)
        if found.peak <= memory:
            low = found
        else:
            high = length
        # 2. Go on with four times as much until a length does not fit, then with the middle.
        length = 4 * length if high == LIMIT else (low.tokens + high) // 2
    return low


def cheapest(job: Job, memory: int, tokens: int) -> Plan:
    """Return the plan of the first settings that fit into ``memory`` bytes, in the order of the time that they cost.

    Raises:
        DoesNotFitError: If none fit.
    """
    # 1. The settings to try: without any policy, then with a tiled loss, then with all others.
    plain = replace(job.settings, tiling=None, activation_checkpointing=None, loss=None)
    settings = [plain]
    with suppress(NothingFoundError):
        find_losses(job.module)
        settings.append(replace(plain, loss="auto"))
    for tiling, policy in _LADDER:
        settings.append(replace(settings[-1], tiling=tiling, activation_checkpointing=policy))
    # 2. The first that fit.
    tried = list[Plan]()
    for one in settings:
        tried.append(plan(job, tokens, one))
        if tried[-1].peak <= memory:
            return tried[-1]
    least = min(tried, key=lambda found: found.peak)
    raise DoesNotFitError(
        f"{tokens} tokens do not fit into {gib(memory)} with any settings: the least is {gib(least.peak)}, with"
        f" {least.settings}. Give more devices, more memory or a shorter sequence length."
    )
