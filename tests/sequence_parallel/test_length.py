"""What a model computes from the length or the positions of a sequence is that of all tokens, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.sequence_parallel.groups import Groups
from tests.sequence_parallel.models import causal, ids, no_labels
from tests.sequence_parallel.runs import step, worst
from tests.world import World

SWITCH = 24
"""The number of tokens above which positions are others."""


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    longest = {"max_position_embeddings": SWITCH if kind == "dynamic" else 4 * SWITCH}
    return longest | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | fields}


_LONG = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": SWITCH}
_PHI = {"original_max_position_embeddings": SWITCH, "bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.0}
_LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 6}
_PER_LAYER = {
    "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", _rope("dynamic", factor=4.0)),
    "longrope": ("phi3", _PHI | _rope("longrope", **_LONG)),
    "yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=SWITCH)),
    "llama3": (
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=SWITCH),
    ),
    "linear": ("llama", _rope("linear", factor=4.0)),
    "one for each kind of layer": (
        "gemma3_text",
        _LAYERS | {"max_position_embeddings": SWITCH, "rope_parameters": _PER_LAYER},
    ),
}


def errors_of_rope(name: str, size: int) -> dict[str, float]:
    """The errors of one model on both sides of the switch, there and back, with labels and without."""
    architecture, fields = ROPES[name]
    models, found = [causal(architecture, **fields)() for _ in range(2)], {}
    lt_tiled.prepare(models[0], loss=True)
    policy = SequenceParallel(size)
    with lt_tiled.prepare(models[1], sequence_parallel=policy, group=Groups.of_size(size).group, loss=True):
        for tokens in (SWITCH - 5, SWITCH + 13, SWITCH - 5, SWITCH + 1):
            x = ids(2, tokens)
            for given in ({"input_ids": x, "labels": x}, no_labels(x)):
                true, shared = (step(model, given) for model in models)
                found[f"{tokens} tokens, labels: {'labels' in given}"] = worst(shared, true)
    return found


@pytest.mark.table("(dynamic|longrope)-2|one for each kind of layer-4")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ROPES)
def test_rope(name: str, size: int, four_ranks: World) -> None:
    """Positions that are others above a length have the loss and gradients of one process on both sides of it."""
    for found in four_ranks(errors_of_rope, name, size):
        assert max(found.values()) < (3e-7 if name == "one for each kind of layer" else 1e-12), found
