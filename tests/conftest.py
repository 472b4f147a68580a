"""Tiers of tests, worlds of ranks, and a clean folder, environment and logging for each test."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_tiled._log import quiet_libraries
from tests import second_device
from tests.world import OnRanks, World, remember_entry_points, unchecked

ON_RANKS = {"four_ranks", "four_deepspeed_ranks", "world", "deepspeed_world", "second_world", "on_ranks"}
"""Fixtures that run ranks. A test that asks for one with ``request`` names its engine by a parameter ``engine``."""


def pytest_configure(config: pytest.Config) -> None:
    quiet_libraries()
    remember_entry_points()
    threads = config.getoption("--threads")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of each process: ranks and scripts read it
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms; read before the first product
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")
    parser.addoption("--threads", type=int, default=1, help="threads of each process, ranks and scripts among them")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Register the second device if a test uses it, and exempt what the imports made from garbage collection, which
    tests call often.
    """
    if any(_on_second(item) for item in session.items) and not torch.cuda.is_available():
        second_device.register()  # before the first backward pass of the process
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> Iterator[None]:
    """Exempt what a file's tests leave behind, such as imports, from later garbage collections."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of ``engines/`` and of ``sequence_parallel/`` in one process each, those of DeepSpeed in another,
    each file of ``examples/`` in one, and other tests wherever a process is free.

    Whole files would leave processes idle at the end, and single tests would start all ranks in every process.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if "/engines/" in file or "/sequence_parallel/" in file:
                return "deepspeed" if "zero" in nodeid or "deepspeed" in nodeid else str(Path(file).parent)
            return file if "/examples/" in file else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tiers, leave the rest of the tables to ``-m full``, and order the tests.

    The GPU tests are skipped without a GPU, and those of the second device with one. Tests on ranks run first, then
    slow ones, so that short tests fill the end.
    """
    for item in items:
        if _on_second(item) and torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch knows one accelerator in a process, here CUDA"))
        assert isinstance(item, pytest.Function)
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("full") or not _in_default_tier(item):
            item.add_marker("full")
        elif not item.get_closest_marker("slow") and not _on_ranks(item):
            item.add_marker("quick")
    named = [argument for argument in config.args if "::" in argument]
    rerun = config.getoption("lf", False) and config.cache.get("cache/lastfailed", {})
    if not named and not rerun and not re.search(r"(?<!not )\b(full|low_precision)\b", config.option.markexpr):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items.sort(key=lambda item: [item.get_closest_marker(name) is not None for name in ("quick", "slow")])
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


def _on_ranks(item: pytest.Function) -> bool:
    return "engine" in item.fixturenames or not ON_RANKS.isdisjoint(item.fixturenames)


def _in_default_tier(item: pytest.Function) -> bool:
    """Whether a test has no table, or is a row of it that ``@pytest.mark.table`` names by a regular expression."""
    table = item.get_closest_marker("table")
    return not table or any(re.fullmatch(rows, item.callspec.id) for rows in table.args)


def _on_second(item: pytest.Item) -> bool:
    if "second_world" in getattr(item, "fixturenames", ()):
        return True
    return getattr(item, "callspec", None) is not None and item.callspec.params.get("device") == second_device.NAME  # type: ignore[attr-defined]


@pytest.fixture(params=["cpu", second_device.NAME, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the CPU, a device without a GPU that is no CPU (``tests/second_device.py``), or the GPU if there is one.

    Parametrize ``device`` with ``indirect=True`` to leave out some of them.
    """
    with second_device.attached() if request.param == second_device.NAME else nullcontext():
        yield request.param


@pytest.fixture(autouse=True)
def _own_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in its own folder, and restore what Lightning or a benchmark changes: the environment, the process
    group, the levels of loggers and what was logged once.
    """
    before = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("lt_tiled", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lt_tiled._log._logged", set())
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():  # by a strategy of Lightning, which leaves it to the end of the process
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _self_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the self-check of tiled modules only in tests marked ``self_checks``."""
    checks = request.node.get_closest_marker("self_checks") is not None
    monkeypatch.setattr(World, "self_checks", checks)
    with nullcontext() if checks else unchecked():
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    """Make float64 the default dtype, whose rounding is below 1e-12 on any processor."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _ranks(size: int) -> Any:
    """Return a fixture of gloo ranks that live for the session."""

    @pytest.fixture(scope="session")
    def ranks() -> Iterator[World]:
        world = World(size)
        yield world
        world.close()

    return ranks


world, four_ranks = _ranks(2), _ranks(4)
deepspeed_world, four_deepspeed_ranks = _ranks(2), _ranks(4)
"""Ranks for DeepSpeed, which changes torch in its process."""
second_world = _ranks(2)
"""Ranks in which the second device is registered before their first backward pass."""


@pytest.fixture(scope="session")
def _known_runs() -> dict[bytes, list[Any]]:
    """Return the results of ``once`` by the pickled call."""
    return {}


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest, _known_runs: dict[bytes, list[Any]]) -> OnRanks:
    """Return a function that runs an engine on two ranks."""
    return OnRanks(request, _known_runs)
