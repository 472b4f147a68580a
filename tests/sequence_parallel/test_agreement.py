"""The ranks that share a sequence have the same batch and run the same blocks, or all of them raise."""

from __future__ import annotations

from collections import UserDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_tiled
from lt_tiled import SequenceParallel
from tests.sequence_parallel.cases import labeled
from tests.sequence_parallel.hybrids import causal
from tests.sequence_parallel.models import GPT, Block, H, Pooled, WithBody, hand_written, ids
from tests.world import World

DOORS = {"causal": causal("llama"), "blocks": hand_written(GPT)}
CHANGES: dict[str, Any] = {
    "values": lambda x, y: (x.index_fill(1, torch.tensor([3]), 1), y),
    "order": lambda x, y: (x.flip(1), y),
    "length": lambda x, y: (x[:, :-1], y[:, :-1]),
    "labels": lambda x, y: (x, y.index_fill(1, torch.tensor([3]), 1)),
    "no labels": lambda x, y: (x, None),
}


def different(door: str, change: str) -> str:
    """What a step says where rank 1 has another batch."""
    x = y = ids(2, 24)
    if dist.get_rank():
        x, y = CHANGES[change](x, y)
    refused = pytest.raises(ValueError, match="different batches")
    with lt_tiled.prepare(model := DOORS[door](), sequence_parallel=2), refused as raised:
        model(input_ids=x, labels=y)
    return str(raised.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("door", DOORS)
def test_another_batch(door: str, change: str, world: World) -> None:
    """A batch that differs in any way raises on all ranks at both doors, and names the remedy."""
    for message in world(different, door, change):
        assert "**strategy.distributed_sampler_kwargs" in message


class OfBatches(GPT):
    """Takes its batch as one mapping."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(**batch)


def different_number() -> None:
    x, refused = ids(2, 24), pytest.raises(ValueError, match="different batches")
    calls = [(causal("llama")(), {**labeled(x), "num_items_in_batch": 48 + dist.get_rank()})]
    calls.append((hand_written(OfBatches)(), {"batch": UserDict(labeled(x + dist.get_rank()))}))
    for model, arguments in calls:
        with lt_tiled.prepare(model, sequence_parallel=2), refused:
            model(**arguments)


def test_numbers_and_mappings(world: World) -> None:
    """Numbers that a call is given count as well, and what is in a tokenizer's mapping."""
    world(different_number)


def hidden_states(change: bool) -> None:
    """A named module is given floating-point numbers, of which some are not finite."""
    model, given = GPT(), torch.randn(2, 24, H, generator=torch.Generator().manual_seed(0))
    given[0, 0] = float("nan")
    if change and dist.get_rank():
        given[1, 20, -1] *= 1.001
    policy = SequenceParallel(2, targets="blocks.0", self_check=False)
    refused = pytest.raises(ValueError, match="different batches") if change else nullcontext()
    with lt_tiled.prepare(model, sequence_parallel=policy), refused:
        model.blocks[0](given)


def test_hidden_states(world: World) -> None:
    """All values of floating-point inputs count, and nan is equal to itself."""
    for change in (False, True):
        world(hidden_states, change)


def dropped() -> None:
    torch.manual_seed(0)
    model = WithBody(dropout=0.3)
    torch.manual_seed(dist.get_rank())
    with lt_tiled.prepare(model, sequence_parallel=2):
        model(**labeled(ids(2, 24))).backward()


def test_dropout_before_the_blocks(world: World) -> None:
    """Dropout of embeddings, which differs between ranks, is no other batch."""
    world(dropped)


class LeavesItselfOut(Block):
    """A block that leaves itself out at random."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if torch.rand(()) < 0.1 else super().forward(x, mask)


def left_out(seed: int) -> str:
    """What is said in eight steps where ranks have multiples of the seed."""
    model = Pooled(block=LeavesItselfOut)
    torch.manual_seed(seed * dist.get_rank())
    with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(2, self_check=False)):
        try:
            for _ in range(8):
                model(ids(2, 37)).backward()
        except ValueError as error:
            return str(error)
    return ""


def test_blocks_that_leave_themselves_out(world: World) -> None:
    """Ranks that leave out different blocks all raise, and those that draw the same numbers train."""
    assert world(left_out, 0) == ["", ""]
    for message in world(left_out, 1):
        assert "on this rank, and something else on another rank" in message
        assert "draw the same numbers" in message


def first_left_out() -> str:
    """What is said where rank 1 does not call the first block."""
    model = Pooled((1, 2) if dist.get_rank() else (0, 1, 2))
    policy = SequenceParallel(2, self_check=False)
    with lt_tiled.prepare(model, sequence_parallel=policy), pytest.raises(ValueError, match="on") as raised:
        model(ids(2, 37))
    return str(raised.value)


def test_a_first_block_that_one_rank_leaves_out(world: World) -> None:
    """A rank that exchanged nothing by the end of a call raises there, and the others where they begin."""
    begins, ends = world(first_left_out)
    assert "different batches" in begins
    assert "the end of the call comes next on this rank" in ends
