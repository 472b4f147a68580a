"""A rank that fails alone ends all ranks of its group in an error, and groups of three ranks share as others do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from tests.sequence_parallel.models import GPT, causal, ids
from tests.sequence_parallel.runs import errors
from tests.world import World

SECONDS = 3
"""After which a collective of gloo gives up, 30 minutes by default; a rank that ends closes its connections at once."""


class Fails(nn.Module):
    """A module that raises on rank 1, once it is told to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.fails = module, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and dist.get_rank() == 1:
            raise KeyError("a fault of rank 1")
        found: Tensor = self.module(x)
        return found


def hand_written() -> tuple[nn.Module, Fails]:
    torch.manual_seed(0)
    model = GPT(blocks=3)
    block: Any = model.blocks[1]
    block.mlp = Fails(block.mlp)
    return model, block.mlp


def llama() -> tuple[nn.Module, Fails]:
    model: Any = causal("llama", num_hidden_layers=3)()
    block = model.model.layers[1]
    block.mlp = Fails(block.mlp)
    return model, block.mlp


def fails(build: Callable[[], tuple[nn.Module, Fails]]) -> list[str]:
    """What two steps say where rank 1 fails inside of the first one, and goes on with the second one."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    model, part = build()
    said = []
    with lt_tiled.prepare(model, sequence_parallel=2, group=group):
        model(input_ids=ids(2, 24), labels=ids(2, 24))  # with the self-check
        for step in range(2):
            part.fails = step == 0
            try:
                output: Any = model(input_ids=(x := ids(2, 24, seed=step)), labels=x)
                (output if isinstance(output, Tensor) else output.loss).backward()
                said.append("a step")
            except (RuntimeError, KeyError) as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("build", [hand_written, llama])
def test_one_rank_fails(build: Any, world: World) -> None:
    """Where one rank fails alone, the others raise when their collective times out, and no rank ends a step."""
    found = world(fails, build)
    world.kill()  # its ranks have seen errors of gloo
    assert "a fault of rank 1" in found[1].pop(0)
    for said in found[0] + found[1]:
        assert "timed out" in said.lower() or "timeout" in said or "closed" in said, found


NAMES = ["llama", "llama 6/3", "no labels", "packed", "hand-written", "padded left"]


@pytest.mark.table("llama|no labels|hand-written")
@pytest.mark.parametrize("name", NAMES)
def test_three_ranks(name: str, three_ranks: World) -> None:
    """A group of three ranks, which divides neither 37 tokens nor 4 heads, has the gradients of one process."""
    for found in three_ranks(errors, [name], 3):
        # Gradients between the ranks are three times as large, which float32 in Llama's norms rounds in another way.
        assert found[name] < (1e-12 if name == "hand-written" else 3e-7)
