"""Loss and gradients of shared sequences are those of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from lt_tiled import Tiling
from tests.sequence_parallel.models import CASES
from tests.sequence_parallel.runs import errors, errors_on_second
from tests.world import World


@pytest.mark.table(
    "(llama|llama 8/1|packed|gemma 3|mixtral|hand-written)-4|(fewer tokens than ranks|qwen 3|no labels)-2"
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_plain(name: str, size: int, four_ranks: World) -> None:
    """Groups of two and four ranks have the loss and gradients of plain data parallelism over groups."""
    for found in four_ranks(errors, [name], size):
        assert found[name] < CASES[name].error


POLICIES: dict[str, dict[str, Any]] = {
    "checkpointed": {"activation_checkpointing": True},
    "tiled": {"tiling": Tiling(3, self_check=False), "activation_checkpointing": True},
    "disk": {"activation_checkpointing": "disk"},
}


@pytest.mark.self_checks
@pytest.mark.table("(gemma 3|hand-written)-disk|mixtral-checkpointed|packed-tiled")
@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ["packed", "gemma 3", "mixtral", "hand-written"])
def test_with_policies(name: str, policies: dict[str, Any], four_ranks: World) -> None:
    """Activation checkpointing, tiles and offloading leave them as they are."""
    for found in four_ranks(errors, [name], 2, policies):
        assert found[name] < (3e-7 if "tiling" in policies else CASES[name].error)


@pytest.mark.table("tiled")
@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_on_a_second_device(policies: dict[str, Any], second_world: World) -> None:
    """On a device that is no CPU, shared sequences of packed and hand-written models have the gradients of whole ones
    there.
    """
    for found in second_world(errors_on_second, ["packed", "hand-written"], policies):
        assert max(found.values()) < (3e-7 if "tiling" in policies else 1e-12), found
