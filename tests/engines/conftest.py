"""Fixtures that run a function of an engine on two ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.world import world_of


class OnRanks:
    """``on_ranks(fn, engine, *args)`` calls ``fn(engine, *args)`` on two ranks: DeepSpeed's engines have their own."""

    def __init__(self, request: pytest.FixtureRequest, known: dict[bytes, list[Any]]) -> None:
        self.request = request
        self.known = known

    def __call__(self, fn: Callable[..., Any], engine: str, *args: Any, **kwargs: Any) -> list[Any]:
        world = world_of(self.request, engine)
        return world(fn, engine, *args, **kwargs)

    def once(self, fn: Callable[..., Any], engine: str, *args: Any) -> list[Any]:
        """Return what the same call returned earlier in the session, and run it only the first time."""
        key = pickle.dumps((fn, engine, args))
        if key not in self.known:
            self.known[key] = self(fn, engine, *args)
        return self.known[key]


@pytest.fixture(scope="session")
def _known_runs() -> dict[bytes, list[Any]]:
    """Return the results of ``once`` by the pickled call."""
    return {}


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest, _known_runs: dict[bytes, list[Any]]) -> OnRanks:
    """Return a function that runs an engine on two ranks."""
    return OnRanks(request, _known_runs)
