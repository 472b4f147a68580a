"""What tiling costs an engine: no collective and no wait for the device beyond the untiled step's, however many tiles
there are.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lt_tiled import Tiling
from lt_tiled.planner.ledger import Ledger
from tests.engines.cells import ENGINES, draw, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import TinyLM, lm_loss

READ = "aten::_local_scalar_dense"


def operations(engine: str, shards: int | None, checkpointed: bool, calls: int = 1) -> dict[str, int]:
    """Collectives, and reads of a value by the host, in the forward passes and the backward of a settled step."""
    tiling = None if shards is None else Tiling(shards, self_check=False)
    fabric = launch(engine, tiling=tiling, activation_checkpointing=checkpointed)
    model, optimizer = set_up(fabric, TinyLM(), engine)
    ids = draw((2, 32), dist.get_rank())

    def backward() -> None:
        fabric.backward(sum((lm_loss(model(ids), ids) for _ in range(calls)), torch.zeros(())))

    for _ in range(4):  # ZeRO-3 has recorded its order, and the fifth recompute of a block is not compared
        backward()
        optimizer.step()
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        backward()
    fabric.strategy.release()
    names = [event.name for event in profiled.events()]
    # The recomputes of several forward passes are compared in each step, which reads values.
    return dict(Counter(name for name in names if name.startswith("c10d::") or (name == READ and calls == 1)))


def flops(engine: str, shards: int | None) -> int:
    """The FLOPs of a settled step with activation checkpointing."""
    tiling = None if shards is None else Tiling(shards, self_check=False)
    fabric = launch(engine, tiling=tiling, activation_checkpointing=True)
    model, optimizer = set_up(fabric, TinyLM(), engine)
    ids = draw((2, 32), dist.get_rank())
    for _ in range(2):
        with Ledger() as counter:
            step_on(fabric, optimizer, lm_loss(model(ids), ids))
    fabric.strategy.release()
    return counter.flops


@pytest.mark.table("ddp|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_flops(engine: str, on_ranks: OnRanks) -> None:
    """A step in tiles has no more FLOPs than the untiled step, and under every engine those of DDP."""
    untiled, tiled = on_ranks(flops, engine, None), on_ranks(flops, engine, 4)
    assert max(tiled) <= min(untiled)
    assert tiled == on_ranks.once(flops, "ddp", 4)


@pytest.mark.table("fsdp2-True-1|zero3-(True-1|False-2)")
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_collectives(engine: str, checkpointed: bool, calls: int, on_ranks: OnRanks) -> None:
    """A step with one or two forward passes has no gather, reduction or read of an element that the untiled step has
    not, at 2 as at 16 tiles.

    Under ZeRO-3 it has fewer gathers, because the weights of a block with tiled modules are all-gathered together, and
    fewer reads where it records the order of its modules, of which there are fewer.
    """
    untiled, *tiled = (on_ranks(operations, engine, shards, checkpointed, calls) for shards in (None, 2, 16))
    for rank, plain in enumerate(untiled):
        assert any(name.startswith("c10d::") for name in plain)
        assert tiled[0][rank] == tiled[1][rank]
        if engine != "zero3":
            assert tiled[0][rank] == plain
        else:
            gather, fewer = "c10d::_allgather_base_", dict.fromkeys(["c10d::_allgather_base_", READ], 0)
            assert 0 < tiled[0][rank][gather] < plain[gather]
            assert tiled[0][rank].get(READ, 0) <= plain.get(READ, 0)
            assert tiled[0][rank] | fewer == plain | fewer
