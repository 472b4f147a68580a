"""Eager attention, which each model of transformers has in its own file, sees all tokens of some heads as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import lt_tiled
from lt_tiled import ActivationCheckpointing
from lt_tiled.sequence_parallel.groups import Groups
from tests.sequence_parallel.hybrids import hybrid, wide
from tests.sequence_parallel.models import ids, no_labels, padded
from tests.sequence_parallel.runs import step, worst
from tests.world import World

_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FIELDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 8},
    "llama": {},
}
INPUTS = {"labels": lambda x: {"input_ids": x, "labels": x}, "no labels": no_labels, "padded": padded(True)}


def error(name: str, inputs: str, size: int, keep: Any) -> float:
    """The error of a checkpointed step that ``size`` ranks share."""
    model: Any = hybrid(name, **FIELDS[name])
    model.set_attn_implementation("eager")
    reference, given, group = copy.deepcopy(model), INPUTS[inputs](ids(2, 37)), Groups.of_size(size).group
    with wide(model):
        with lt_tiled.prepare(reference, loss=True):
            true = step(reference, given)
        policy = ActivationCheckpointing(keep=keep)
        with lt_tiled.prepare(model, sequence_parallel=size, group=group, activation_checkpointing=policy, loss=True):
            return worst(step(model, given), true)


@pytest.mark.parametrize(
    ("name", "inputs", "size", "keep"),
    [
        ("gpt_oss", "labels", 4, None),
        ("gpt_oss", "padded", 2, "attention"),
        ("gemma2", "no labels", 2, "exchange"),
        ("llama", "padded", 4, None),
    ],
)
def test_gradients(name: str, inputs: str, size: int, keep: Any, four_ranks: World) -> None:
    """Masks are those of all tokens, and attention sinks those of the rank's heads, whose gradients are not lost."""
    for found in four_ranks(error, name, inputs, size, keep):
        assert found < 1e-12
