"""What a block with activation checkpointing keeps for its recompute, and the collectives of a step."""

from __future__ import annotations

from typing import Any

import pytest

from lt_tiled import ActivationCheckpointing, Tiling
from tests.sequence_parallel.models import CASES
from tests.sequence_parallel.runs import collectives, errors, reads, twice
from tests.world import World

LAYERS = 3


EVERYTHING: dict[str, Any] = {"offload": "disk"}


@pytest.mark.table("(llama|hand-written)-.*")
@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in ("packed", "gemma 3", "hand-written")] + [("llama", EVERYTHING)],
    ids=str,
)
def test_gradients(name: str, fields: dict[str, Any], four_ranks: World) -> None:
    """Loss and gradients do not depend on what is kept, nor on where."""
    policies: dict[str, Any] = {"activation_checkpointing": ActivationCheckpointing(keep="attention", **fields)}
    if fields:
        policies["tiling"] = Tiling(3, self_check=False)
    for found in four_ranks(errors, [name], 2, policies):
        assert found[name] < (3e-7 if "tiling" in policies else CASES[name].error)


@pytest.mark.parametrize(("keep", "count"), [(None, 6), ("attention", 4)])
def test_collectives(keep: Any, count: int, four_ranks: World) -> None:
    """A layer makes two all-to-alls in the forward pass and two in the backward pass, and two in its recompute unless
    they are kept; a step makes one all-reduce for the loss, and nothing else.
    """
    for found in four_ranks(collectives, LAYERS, keep):
        assert found == {"all_to_all": count * LAYERS, "group_mean": 1}


@pytest.mark.parametrize(("keep", "count"), [(None, 2), ("attention", 1)])
def test_attention_runs(keep: Any, count: int, four_ranks: World) -> None:
    """Where attention is kept, it is not computed in the recompute."""
    for found in four_ranks(collectives, LAYERS, keep, True):
        assert found["attention"] == count * LAYERS


@pytest.mark.table("packed|hand-written")
@pytest.mark.parametrize("name", ["llama", "packed", "padded left", "hand-written"])
def test_reads_of_values(name: str, world: World) -> None:
    """A step reads no more values on the host, where a GPU would be waited for, than without sequence parallelism."""
    for without, shared in world(reads, name):
        assert shared <= without


@pytest.mark.parametrize("keep", [None, "attention"])
def test_second_backward_pass(keep: Any, four_ranks: World) -> None:
    """``retain_graph=True`` allows a second backward pass with the same gradients."""
    for first, second in four_ranks(twice, keep):
        assert first == second
