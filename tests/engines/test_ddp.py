"""Gradients in float64 under bare torch's ``DistributedDataParallel`` on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lt_tiled import Tiling, prepare
from tests.engines.cells import draw
from tests.models import TinyLM, lm_loss
from tests.parity import EXACT
from tests.world import World

Batches = list[list[tuple[int, int]]]
"""For each rank the shapes of its micro-batches."""

EVEN: Batches = [[(2, 24)], [(2, 24)]]
UNEVEN: Batches = [[(2, 24)], [(1, 7)]]


class WithSpare(TinyLM):
    """Has a head that only rank 1 uses, and inside a tiled module a weight that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 32)
        self.blocks[0].mlp.spare = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits if not dist.get_rank() else logits + self.spare(logits)


def ddp_error(
    model: type[TinyLM],
    options: dict[str, Any],
    batches: Batches,
    shards: list[int],
    checkpointed: bool,
    steps: int = 2,
) -> float:
    """The worst gradient's relative error, on this rank, against the untiled float64 gradients averaged over the
    ranks.
    """
    torch.manual_seed(0)
    net = model().double()
    true = copy.deepcopy(net)
    mine = [draw(shape, dist.get_rank()) for shape in batches[dist.get_rank()]]
    sum(lm_loss(true(ids), ids) for ids in mine).backward()
    for p in true.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    prepared = prepare(net, tiling=Tiling(shards[dist.get_rank()]), activation_checkpointing=checkpointed)
    wrapped = DistributedDataParallel(net, **options)
    worst = 0.0
    for _ in range(steps):
        wrapped.zero_grad(set_to_none=True)
        for ids in mine[:-1]:
            with wrapped.no_sync():
                lm_loss(wrapped(ids), ids).backward()
        lm_loss(wrapped(mine[-1]), mine[-1]).backward()
        for p, t in zip(net.parameters(), true.parameters(), strict=True):
            found = torch.zeros_like(p) if p.grad is None else p.grad
            worst = max(worst, float((found - t.grad).norm() / t.grad.norm().clamp_min(1e-12)))
    assert all(row.tiles > 1 for row in prepared.report().tiled)
    return worst


MICRO: Batches = [[(2, 24), (1, 5), (1, 30)], [(1, 9), (2, 3), (2, 11)]]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("model", "options", "batches", "shards"),
    [
        (TinyLM, {}, EVEN, [4, 4]),
        (TinyLM, {"find_unused_parameters": True}, EVEN, [4, 4]),
        (TinyLM, {"static_graph": True}, EVEN, [4, 4]),
        (TinyLM, {"gradient_as_bucket_view": True}, EVEN, [4, 4]),
        (TinyLM, {}, UNEVEN, [7, 2]),
        (TinyLM, {}, MICRO, [8, 3]),
        (WithSpare, {"find_unused_parameters": True}, EVEN, [4, 4]),
    ],
    ids=["plain", "unused allowed", "static graph", "bucket view", "unequal lengths", "no_sync", "unused weights"],
)
def test_gradients(
    model: type[TinyLM],
    options: dict[str, Any],
    batches: Batches,
    shards: list[int],
    checkpointed: bool,
    world: World,
) -> None:
    """Gradients are the untiled ones averaged over the ranks, step after step: under each of DDP's options; with other
    lengths and shard counts on each rank; with micro-batches under ``no_sync``, of fewer tokens than shards among them;
    and with weights that one rank, or none, uses.
    """
    assert max(world(ddp_error, model, options, batches, shards, checkpointed)) < EXACT
