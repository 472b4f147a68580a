"""Eager attention with sinks, which each model of transformers has in its own file, sees all tokens of some heads."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

import lt_tiled
from lt_tiled import ActivationCheckpointing
from lt_tiled.sequence_parallel.groups import Groups
from tests.sequence_parallel.hybrids import hybrid, wide
from tests.sequence_parallel.models import causal, ids, padded
from tests.sequence_parallel.runs import against_whole, step, worst
from tests.world import World

FIELDS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def error(padding: bool, size: int, keep: Any) -> float:
    """The error of a checkpointed step that ``size`` ranks share."""
    model: Any = hybrid("gpt_oss", **FIELDS)
    model.set_attn_implementation("eager")
    x, group = ids(2, 37), Groups.of_size(size).group
    reference, given = copy.deepcopy(model), padded(True)(x) if padding else {"input_ids": x, "labels": x}
    with wide(model):
        with lt_tiled.prepare(reference, loss=True):
            true = step(reference, given)
        policy = ActivationCheckpointing(keep=keep)
        with lt_tiled.prepare(model, sequence_parallel=size, group=group, activation_checkpointing=policy, loss=True):
            return worst(step(model, given), true)


@pytest.mark.parametrize(("padding", "size", "keep"), [(False, 4, None), (True, 2, "attention")])
def test_gradients(padding: bool, size: int, keep: Any, four_ranks: World) -> None:
    """Masks are those of all tokens, and attention sinks those of the rank's heads, whose gradients are not lost."""
    for found in four_ranks(error, padding, size, keep):
        assert found < 1e-12


def without_sinks() -> str:
    model: Any = causal("llama")()
    model.set_attn_implementation("eager")
    return against_whole(model, {"input_ids": (x := ids(2, 37)), "labels": x})[2]


def test_eager_attention_without_sinks(world: World) -> None:
    """It is refused, with what to load the model with."""
    for message in world(without_sinks):
        assert re.search("Use (the )?sdpa, flash or flex attention", message)
