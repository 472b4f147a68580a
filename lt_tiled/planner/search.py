"""Search plans: for the longest sequence that fits, and for the cheapest settings with which one fits."""

from __future__ import annotations

from dataclasses import replace

from lt_tiled.errors import DoesNotFitError
from lt_tiled.memory import gib
from lt_tiled.planner.job import Job
from lt_tiled.planner.simulate import Plan, plan
from lt_tiled.policies import ActivationCheckpointing, LossShards, Tiling

SHORTEST = 256
"""The shortest sequence of a search. All of its sequence lengths are multiples of it."""
LIMIT = 2**27
"""The longest sequence of a search: if such a step fits, its memory hardly depends on the sequence length."""
CLOSE = 0.02
"""A search ends within this share of the longest sequence."""
_LADDER: tuple[tuple[LossShards | None, Tiling | None, ActivationCheckpointing | None], ...] = (
    (None, None, None),
    ("auto", None, None),
    ("auto", None, ActivationCheckpointing(keep="attention")),
    ("auto", Tiling(), ActivationCheckpointing(keep="attention")),
    ("auto", None, ActivationCheckpointing()),
    ("auto", Tiling(), ActivationCheckpointing()),
    ("auto", Tiling(), ActivationCheckpointing(offload="cpu")),
    ("auto", Tiling(), ActivationCheckpointing(offload="disk")),
)
"""Policies in the order of the time that they cost. Tiles cost none, but for the host."""


def longest(job: Job, memory: int) -> Plan:
    """Return the plan of the longest sequence, within 2 %, whose step fits into ``memory`` bytes.

    Raises:
        DoesNotFitError: If not even the shortest sequence fits.
    """
    low = plan(job, SHORTEST)
    if low.peak > memory:
        raise DoesNotFitError(
            f"{SHORTEST} tokens already take {gib(low.peak)}, more than {gib(memory)}: use more memory or devices."
        )
    high = LIMIT
    while high - low.tokens > max(SHORTEST, CLOSE * low.tokens):
        # Four times as much until a length does not fit, then the middle of what fits and what does not.
        middle = (low.tokens + high) // 2 // SHORTEST * SHORTEST
        found = plan(job, min(4 * low.tokens, middle))
        if found.peak <= memory:
            low = found
        else:
            high = found.tokens
    return low


def cheapest(job: Job, memory: int, tokens: int | None = None) -> Plan:
    """Return the plan of the first settings that fit into ``memory`` bytes, in the order of the time that they cost.

    Raises:
        DoesNotFitError: If none fit.
    """
    for loss, tiling, checkpointing in _LADDER:
        found = plan(replace(job, loss=loss, tiling=tiling, activation_checkpointing=checkpointing), tokens)
        if found.peak <= memory:
            return found
    raise DoesNotFitError(
        f"{found.tokens} tokens do not fit into {gib(memory)} with any settings: they take {gib(found.peak)} with"
        f" {found.job.settings()}. Give more devices, more memory or a shorter sequence length."
    )
