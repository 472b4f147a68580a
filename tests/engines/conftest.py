"""Running a function of an engine on the two ranks that engine may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.world import World

OnRanks = Callable[..., list[Any]]


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """``on_ranks(fn, engine, *args)`` calls ``fn(engine, *args)`` on two ranks, those of DeepSpeed for its engines."""

    def run(fn: Callable[..., Any], engine: str, *args: Any, **kwargs: Any) -> list[Any]:
        world: World = request.getfixturevalue("deepspeed_world" if engine.startswith("zero") else "world")
        return world(fn, engine, *args, **kwargs)

    return run
