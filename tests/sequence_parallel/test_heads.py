"""Heads at a time: the same results, in less memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sequence_parallel.models import CASES
from tests.sequence_parallel.runs import errors
from tests.world import World

TILES, KEPT = {"head_tiles": 2}, {"head_tiles": 4, "keep": "attention"}
NAMES = ["llama", "llama 8/8", "llama 6/3", "packed", "gemma 3", "qwen 3", "mixtral"]


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [(name, KEPT, 1) for name in NAMES] + [(name, TILES, 2) for name in NAMES] + [("llama 8/8", KEPT, 4)],
    ids=str,
)
def test_gradients(name: str, options: dict[str, Any], size: int, four_ranks: World) -> None:
    """Loss and gradients are those of all heads at once."""
    for found in four_ranks(errors, [name], size, options, {"checkpointing": True}):
        assert found[name] < CASES[name].error
