"""Plans of steps in which ranks share each sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lt_tiled import SequenceParallel, TiledModelParallelStrategy
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.search import plan
from tests.planner.runs import LLAMA

pytestmark = pytest.mark.slow

TOKENS = 8192


def job(strategy: Any, devices: int = 4, **config: Any) -> Job:
    with torch.device("meta"):
        module = CausalLM({**LLAMA, "num_hidden_layers": 1, **config})
    settings = {"strategy": strategy, "accelerator": "cpu", "devices": devices}
    return make_job(module, TextFiles(seq_len=2048), settings)


def held(job: Job, tokens: int, policy: SequenceParallel | None) -> tuple[dict[str, int], int]:
    """The most that each part ever holds, and the FLOPs of a step."""
    run = plan(job, tokens, replace(job.settings, sequence_parallel=policy)).simulation
    return {part: max(row) for part, row in run.over_time().items()}, run.flops


@pytest.mark.table("2")
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_holds_one_sequence(size: int) -> None:
    """A rank of a group holds the shards of all ranks, the block inputs and the loss of its own tokens, and does its
    part of the work.
    """
    base = job(TiledModelParallelStrategy(activation_checkpointing=True))
    shared, work = held(base, TOKENS, SequenceParallel(size))
    part, _ = held(base, TOKENS // size, None)
    _, whole_work = held(base, TOKENS, None)
    for same in ("weights", "optimizer", "gradients", "gathered", "block inputs"):
        assert shared[same] == part[same]
    assert work * size == whole_work
