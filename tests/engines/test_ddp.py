"""Tiled modules under ``DistributedDataParallel`` on two ranks: in bare torch, and beside stock DDP in the Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lt_tiled import ActivationCheckpointing, TiledDDPStrategy, Tiling, prepare
from lt_tiled.callbacks import TiledMLP
from tests.engines.cells import draw
from tests.lit import LitTiny, replaced, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import EXACT, near
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


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_gradients(world: World, options: dict[str, Any], checkpointed: bool) -> None:
    """Under each of DDP's options, checkpointed or not, gradients are the untiled ones averaged over the ranks, step
    after step.
    """
    assert max(world(ddp_error, TinyLM, options, EVEN, [4, 4], checkpointed)) < EXACT


@pytest.mark.parametrize("checkpointed", [False, True])
def test_unequal_lengths_and_shard_counts(world: World, checkpointed: bool) -> None:
    """Ranks with different lengths and different shard counts neither wait for each other nor change the result."""
    assert max(world(ddp_error, TinyLM, {}, UNEVEN, [7, 2], checkpointed)) < EXACT


@pytest.mark.parametrize("checkpointed", [False, True])
def test_accumulation_with_no_sync(world: World, checkpointed: bool) -> None:
    """Micro-batches of different lengths under ``no_sync`` add up, with fewer tokens than shards among them."""
    batches: Batches = [[(2, 24), (1, 5), (1, 30)], [(1, 9), (2, 3), (2, 11)]]
    assert max(world(ddp_error, TinyLM, {}, batches, [8, 3], checkpointed)) < EXACT


def test_unused_weights(world: World) -> None:
    """With ``find_unused_parameters`` a head that one rank does not use, and a weight that no rank uses, have the
    untiled gradients.
    """
    assert max(world(ddp_error, WithSpare, {"find_unused_parameters": True}, EVEN, [4, 4], True)) < EXACT


def ddp_offload(directory: str | None, steps: int = 20) -> tuple[list[float], list[float], int]:
    """Losses with accumulation and validation, the sums of the weights at the end, and the bytes that went to disk."""
    torch.manual_seed(0)
    net = TinyLM(4)
    offload = {} if directory is None else {"offload": "disk", "directory": directory}
    with prepare(net, tiling=Tiling(3), activation_checkpointing=ActivationCheckpointing(**offload)) as prepared:
        wrapped = DistributedDataParallel(net)
        optimizer, losses = torch.optim.AdamW(wrapped.parameters(), 1e-2), []
        for step in range(steps):
            first, second = draw((2, 12 + step), dist.get_rank()), draw((1, 7), dist.get_rank())
            with wrapped.no_sync():
                lm_loss(wrapped(first), first).backward()
            loss = lm_loss(wrapped(second), second)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                with torch.no_grad():
                    losses.append(float(lm_loss(net(first), first)))
        moved = prepared.offloader.so_far().disk_bytes if prepared.offloader else 0
    return losses, [float(p.detach().double().sum()) for p in net.parameters()], moved


def test_offload_is_bit_identical(world: World, tmp_path: Path) -> None:
    """Over 20 steps with ``no_sync`` and validation, two ranks in one directory have bit for bit the losses and weights
    without offload.
    """
    plain, offloaded = world(ddp_offload, None), world(ddp_offload, str(tmp_path))
    for (losses, weights, _), (offloaded_losses, offloaded_weights, moved) in zip(plain, offloaded, strict=True):
        assert offloaded_losses == losses
        assert offloaded_weights == weights
        assert moved > 0
    assert list(tmp_path.iterdir()) == []


CASES: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "stock": lambda: ("ddp", []),
    "named": lambda: ("tiled_ddp", []),
    "find_unused_parameters": lambda: (TiledDDPStrategy(tiling=4, find_unused_parameters=True), []),
    "static_graph": lambda: (TiledDDPStrategy(tiling=4, static_graph=True), []),
    "callback": lambda: ("ddp", [TiledMLP(4)]),
}


def fit(case: str) -> tuple[list[float], list[float], set[int], int]:
    model, (strategy, callbacks) = LitTiny(), CASES[case]()
    trainer(strategy, devices=2, callbacks=callbacks).fit(model)
    return model.losses, model.val_losses, model.forwards_replaced, replaced(model)


@pytest.mark.parametrize("case", [case for case in CASES if case != "stock"])
def test_trainer(world: World, case: str) -> None:
    """Losses of training and validation are those of stock DDP, modules are marked in every step, and none after the
    run: by the strategy's registered name, with DDP's options, and with the callback beside stock DDP.
    """
    plain, tiled = world(fit, "stock"), world(fit, case)
    for (losses, val_losses, _, _), (tiled_losses, tiled_val_losses, during, after) in zip(plain, tiled, strict=True):
        assert len(losses) == 3
        assert tiled_losses == near(losses)
        assert tiled_val_losses == near(val_losses)
        assert (during, after) == ({6}, 0)
