"""Tiled modules under ``DistributedDataParallel`` on two ranks: in bare torch, in the Trainer and in Fabric."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lt_tiled
from lt_tiled import ActivationCheckpointing, TiledDDPStrategy, Tiling, prepare
from lt_tiled.callbacks import TiledMLP
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


def draw(shape: tuple[int, int], rank: int) -> Tensor:
    return torch.randint(32, shape, generator=torch.Generator().manual_seed(100 * rank + shape[1]))


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

    prepared = prepare(
        net,
        tiling=Tiling(shards[dist.get_rank()]),
        activation_checkpointing=ActivationCheckpointing() if checkpointed else None,
    )
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


# Offload


def ddp_offload(directory: str | None, steps: int = 20) -> tuple[list[float], list[float], int]:
    """Losses with accumulation and validation, the sums of the weights at the end, and the bytes that went to disk."""
    torch.manual_seed(0)
    net = TinyLM(4)
    offload = {} if directory is None else {"offload": "disk", "directory": directory, "min_bytes": 0}
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


def share_of_the_budget(strategy: Any) -> int:
    model = LitTiny()
    run = trainer(strategy, devices=2)
    budgets: list[int] = []

    class Look(pl.Callback):
        def on_train_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
            prepared = getattr(run.strategy, "prepared", None) or run.callbacks[0].prepared
            budgets.append(prepared[0].offloader.disk.spill.budget)

    run.callbacks.append(Look())
    run.fit(model)
    return budgets[0]


def strategy_share(directory: str) -> int:
    policy = ActivationCheckpointing(offload="disk", disk_budget="8MiB", directory=directory)
    return share_of_the_budget(TiledDDPStrategy(tiling=4, activation_checkpointing=policy))


def test_ranks_share_the_nodes_budget(world: World, tmp_path: Path) -> None:
    """Each of two ranks of a node reserves half of the node's budget."""
    assert world(strategy_share, str(tmp_path)) == [4 * 2**20] * 2


# Trainer


def fit(
    strategy: Any, callbacks: list[pl.Callback] | None = None, **kwargs: Any
) -> tuple[list[float], list[float], set[int], int]:
    model = LitTiny()
    trainer(strategy, devices=2, callbacks=callbacks, **kwargs).fit(model)
    return model.losses, model.val_losses, model.forwards_replaced, replaced(model)


def fit_plain(**kwargs: Any) -> tuple[list[float], list[float], set[int], int]:
    return fit("ddp", **kwargs)


def fit_tiled(options: dict[str, Any], **kwargs: Any) -> tuple[list[float], list[float], set[int], int]:
    return fit(
        TiledDDPStrategy(tiling=Tiling(num_shards=4), activation_checkpointing=ActivationCheckpointing(), **options),
        **kwargs,
    )


def fit_named() -> tuple[list[float], list[float], set[int], int]:
    return fit("tiled_ddp")


def fit_callback() -> tuple[list[float], list[float], set[int], int]:
    return fit("ddp", callbacks=[TiledMLP(4)])


def in_trainer(case: str, kwargs: dict[str, Any]) -> tuple[list[float], list[float], set[int], int]:
    if case == "plain":
        return fit_plain(**kwargs)
    if case in ("named", "callback"):
        return {"named": fit_named, "callback": fit_callback}[case]()
    return fit_tiled({case: True} if case != "strategy" else {}, **kwargs)


@pytest.mark.parametrize("case", ["strategy", "find_unused_parameters", "static_graph", "named", "callback"])
def test_trainer(world: World, case: str) -> None:
    """Losses of training and validation are those of stock DDP, modules are marked in every step, and none after the
    run.

    For the strategy, its options, its registered name, and the callback beside stock DDP.
    """
    plain, tiled = world(in_trainer, "plain", {}), world(in_trainer, case, {})
    for (losses, val_losses, _, _), (tiled_losses, tiled_val_losses, during, after) in zip(plain, tiled, strict=True):
        assert len(losses) == 3
        assert tiled_losses == near(losses)
        assert tiled_val_losses == near(val_losses)
        assert during == {6}
        assert after == 0


@pytest.mark.parametrize("kwargs", [{"accumulate_grad_batches": 2, "max_steps": 2}, {"gradient_clip_val": 0.1}])
def test_trainer_options(world: World, kwargs: dict[str, Any]) -> None:
    """Gradient accumulation and clipping train as they do untiled."""
    plain, tiled = world(in_trainer, "plain", kwargs), world(in_trainer, "strategy", kwargs)
    assert [t[0] for t in tiled] == [near(p[0]) for p in plain]


# Fabric


def in_fabric(tiled: bool) -> tuple[list[float], int, int]:
    strategy = lt_tiled.fabric.TiledDDPStrategy(tiling=4) if tiled else "ddp"
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    net = TinyLM()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    during, losses = replaced(net), []
    for step in range(4):
        ids = draw((2, 24 + step), fabric.global_rank)
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = lm_loss(model(ids), ids)
            fabric.backward(loss)
        losses.append(float(loss.detach()))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    if tiled:
        fabric.strategy.release()
    return losses, during, replaced(net)


def test_fabric(world: World) -> None:
    """Losses with accumulation under ``no_backward_sync`` are those of stock DDP; ``release`` takes the patches off."""
    plain, tiled = world(in_fabric, False), world(in_fabric, True)
    for (losses, _, _), (tiled_losses, during, after) in zip(plain, tiled, strict=True):
        assert tiled_losses == near(losses)
        assert (during, after) == (6, 0)
