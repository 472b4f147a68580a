"""Heads at a time: the same results, in less memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sequence_parallel.models import CASES
from tests.sequence_parallel.runs import errors
from tests.world import World


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("options", [{"head_tiles": 2}, {"head_tiles": 4, "keep": "attention"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama 8/8", "llama 6/3", "packed", "gemma 3", "qwen 3", "mixtral"])
def test_gradients(name: str, options: dict[str, Any], size: int, four_ranks: World) -> None:
    """Loss and gradients are those of all heads at once."""
    for found in four_ranks(errors, [name], size, options, {"checkpointing": True}):
        assert found[name] < CASES[name].error
