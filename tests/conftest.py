"""Tiers of tests, worlds of ranks, and a clean folder, environment and logging for each test."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests import second_device
from tests.processes import guard
from tests.world import World

TESTS = Path(__file__).parent
ON_RANKS = {"four_ranks", "four_deepspeed_ranks", "world", "deepspeed_world", "second_world", "on_ranks"}
"""Fixtures that run ranks."""
SLOW = (
    "benchmarks/",
    "callbacks/test_memory_monitor.py::test_accumulation",
    "callbacks/test_memory_monitor.py::test_picture_and_prediction",
    "callbacks/test_sequence_length_finder.py::test_memory_that_really_ends",
    "docs/",
    "engines/test_launch.py",
    "engines/test_setup.py::test_one_device",
    "examples/",
    "lm/test_causal.py::test_flex_attention",
    "lm/test_causal.py::test_trains_any_architecture",
    "lm/test_export.py::test_transformers_loads",
    "lm/test_text.py::test_resumed_in_an_epoch",
    "loss/test_functional.py::test_auto_tiles_do_not_raise_the_peak",
    "offload/test_blocks.py::test_bit_identical",
    "offload/test_processes.py",
    "planner/test_command.py",
    "planner/test_floor.py",
    "planner/test_plan.py",
    "planner/test_prediction.py",
    "planner/test_repeats.py",
    "planner/test_sharing.py",
    "property/",
    "sequence_parallel/test_data.py::test_evaluation",
    "sequence_parallel/test_data.py::test_resumed",
    "sequence_parallel/test_engines.py",
    "sequence_parallel/test_memory.py::test_head_tiles",
    "strategies/test_fabric.py::test_compiled",
    "strategies/test_strategies.py::test_compiled_lightning_module",
    "test_bad_input.py::test_a_model_that",
    "test_bad_input.py::test_the_first_step",
    "test_bad_input.py::test_weights",
    "test_bad_input.py::test_what_is_no_checkpoint",
    "test_cli.py::test_compile_options",
    "test_cli.py::test_configs_differ_in_the_strategy_alone",
    "test_cli.py::test_every_config_on_two_cpu_ranks",
    "test_cli.py::test_help_shows_all_arguments",
    "test_cli.py::test_list_of_targets",
    "test_cli.py::test_offload_configs",
    "test_cli.py::test_own_",
    "test_cli.py::test_quickstart",
    "test_cli.py::test_short_forms",
    "test_cli.py::test_tiled_loss",
    "test_import.py",
    "test_private_names.py::test_each",
    "test_release.py",
    "test_verify.py::test_a_wrong",
    "test_verify.py::test_architectures",
    "test_verify.py::test_command",
    "test_verify.py::test_compiled",
    "test_verify.py::test_figures",
    "test_verify.py::test_frozen",
    "test_verify.py::test_loss",
    "test_verify.py::test_tied",
    "test_world.py",
    "tiling/test_architectures.py",
    "tiling/test_between.py::test_interrupted",
    "tiling/test_compiled.py",
    "tiling/test_costs.py::test_hugging_face",
    "tiling/test_deferred.py::test_architectures_cost_nothing_more",
    "tiling/test_deferred.py::test_compiled_as_a_whole",
    "tiling/test_modes.py::test_compiled",
)
"""Starts of the names of tests outside the quick tier: they start processes, or take seconds."""


def pytest_configure() -> None:
    guard()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread for each process: ranks and scripts share the cores
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms; read before the first product
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables of the docs anew instead of comparing them"
    )
    parser.addoption(
        "--examples", type=int, help="draw this many random examples for each property-based test (tests/property)"
    )


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
    """Exempt what is left of the tests of a file, such as more imports, from the garbage collections of the next."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tier. Skip the GPU tests on a machine without a GPU, and those of the second device with one."""
    for item in items:
        if _on_second(item) and torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch knows one accelerator in a process, here CUDA"))
        assert isinstance(item, pytest.Function)
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
            continue
        name = f"{os.path.relpath(item.path, TESTS)}::{item.name}"
        if not ON_RANKS & set(item.fixturenames) and not name.startswith(SLOW):
            item.add_marker("quick")


def _on_second(item: pytest.Item) -> bool:
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
    group and the levels of loggers.
    """
    before = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("lt_tiled", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    monkeypatch.chdir(tmp_path)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():  # by a strategy of Lightning, which leaves it to the end of the process
        torch.distributed.destroy_process_group()


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
    """Return two more ranks, because ZeRO-3 leaves ``torch.nn.functional.linear`` replaced in its process."""
    return _two_deepspeed_ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    """Return four gloo ranks that live for the session."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four_deepspeed_ranks() -> Iterator[World]:
    """Return four more ranks, for ZeRO-3 as in ``deepspeed_world``."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def second_world() -> Iterator[World]:
    """Return two more ranks, in which the second device is registered before their first backward pass."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture
def world(_two_ranks: World) -> World:
    """Return two gloo ranks that live for the session."""
    return _two_ranks
