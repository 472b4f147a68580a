"""Fixtures: worlds of ranks, a clean place for what runs write, and the GPU mark."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.world import World


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables of the docs anew instead of comparing them"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports made stays: collecting garbage need not look at it again, and the package's and the tests' own
    calls are many.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _own_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in a folder of its own, and what Lightning leaves in the environment is put back."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def _two_ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def _two_deepspeed_ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture
def deepspeed_world(_two_deepspeed_ranks: World) -> World:
    """Two more: ZeRO-3 leaves ``torch.nn.functional.linear`` replaced in its process."""
    return _two_deepspeed_ranks


@pytest.fixture
def world(_two_ranks: World) -> World:
    """Two gloo ranks that live for the session."""
    return _two_ranks
