"""Short calls that ``recompute="auto"``, the default, does not recompute, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import lt_tiled.auto
from lt_tiled import prepare
from lt_tiled.checkpointing import BlockPatch
from lt_tiled.communicates import has_engine_inside, names_collectives
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.patch import get_patch
from lt_tiled.planner.ledger import Ledger
from tests.architectures import ARCHITECTURES
from tests.engines.cells import ENGINES, draw, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import WIDE, H, TinyLM, lm_loss
from tests.parity import near
from tests.world import World

OFF: dict[str, Any] = {"tiling": None, "activation_checkpointing": None}


def flops(engine: str, options: dict[str, Any]) -> list[int]:
    """The FLOPs of three steps on 256 tokens."""
    fabric = launch(engine, **options)
    model, optimizer = set_up(fabric, TinyLM(), engine)
    ids, counted = draw((1, 256), dist.get_rank()), []
    for _ in range(3):
        with Ledger() as counter:
            fabric.backward(lm_loss(model(ids), ids))
        optimizer.step()
        optimizer.zero_grad()
        counted.append(counter.flops)
    fabric.strategy.release()
    return counted


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_step_has_the_flops_of_the_plain_one(engine: str, on_ranks: OnRanks) -> None:
    """From the second step on, the defaults cost no FLOPs on 256 tokens.

    Under ZeRO-1 and 2 a call is one tile, for the order of gradients, and the first projections are recomputed.
    """
    plain, ours = (on_ranks(flops, engine, options) for options in (OFF, {}))
    projections = 2 * 2 * 256 * H * (WIDE + 3 * H) if engine in ("zero1", "zero2") else 0
    for before, now in zip(plain, ours, strict=True):
        assert [flops - projections for flops in now[1:]] == before[1:]


def straddle(engine: str, options: dict[str, Any], bound: int) -> tuple[list[float], list[int]]:
    """Six steps on ranks whose lengths are on both sides of the bound; the losses and what was not recomputed."""
    before, lt_tiled.auto.LEAST = lt_tiled.auto.LEAST, bound
    try:
        fabric = launch(engine, **options)
        model, optimizer = set_up(fabric, TinyLM(), engine)
        losses = []
        for step in range(6):
            ids = draw((1, (64, 1024)[(dist.get_rank() + step // 2) % 2]), dist.get_rank())
            losses.append(step_on(fabric, optimizer, lm_loss(model(ids), ids)))
        prepared = fabric.strategy.prepared
        tokens = [row.tokens for row in prepared[0].report().blocks] if prepared else []
        fabric.strategy.release()
        return losses, tokens
    finally:
        lt_tiled.auto.LEAST = before


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_on_both_sides_of_the_bound(engine: str, tiling: bool, on_ranks: OnRanks) -> None:
    """Ranks of which some recompute have the losses of the plain run, and none waits for another.

    Without tiles the blocks are no leaf modules of ZeRO-3, which gathers inside of them, so they are recomputed.
    """
    plain = on_ranks(straddle, engine, OFF, 2**19)
    ours = on_ranks(straddle, engine, {"tiling": tiling}, 2**19)
    for (before, _), (now, tokens) in zip(plain, ours, strict=True):
        assert now == near(before)
        assert set(tokens) == {0 if engine == "zero3" and not tiling else 64}


class Summing(nn.Module):
    """Adds what the other ranks have: a recompute of it communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().sum()
        dist.all_reduce(total)
        return self.inner(x) + total


class Total(torch.autograd.Function):
    """Sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().sum()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def add_total(_: Any, __: Any, output: Tensor) -> Tensor:
    return output + Total.apply(output.detach()) if LATE else output


LATE: list[bool] = []
"""Whether what communicates only in later calls does now."""


class Late(nn.Linear):
    """Adds what the other ranks have in later calls."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return add_total(None, None, super().forward(x))


class Hooked(nn.Linear):
    """Does so in a hook."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_forward_hook(add_total)


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(part(), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nn.Linear):
    """A layer that does not communicate."""

    def __init__(self) -> None:
        super().__init__(8, 8)


PARTS = {"collective": Summing, "late": Late, "hook": Hooked}


def recomputed(kind: str) -> list[bool]:
    """Whether each block is always recomputed; ranks have different lengths, on both sides of the bound."""
    before, lt_tiled.auto.LEAST = lt_tiled.auto.LEAST, 2**15
    LATE.clear()
    try:
        net = Blocks(PARTS.get(kind, Plain))
        with prepare(net, activation_checkpointing="auto"):
            patches = [get_patch(block, BlockPatch) for block in net.blocks]
            for step in range(6):
                if (kind, step) in (("fsdp2", 0), ("fsdp2 later", 2)):
                    for block in net.blocks:
                        fully_shard(block[0])
                    fully_shard(net)
                if step == 2:
                    LATE.append(True)
                tokens = (16, 4096)[(dist.get_rank() + step // 2) % 2]
                net(torch.randn(1, tokens, 8)).sum().backward()
            return [bool(patch and patch.auto and patch.auto.communicates) for patch in patches]
    finally:
        lt_tiled.auto.LEAST = before


@pytest.mark.parametrize(
    ("kind", "always"), [("none", False), *[(kind, True) for kind in (*PARTS, "fsdp2", "fsdp2 later")]]
)
def test_a_block_that_communicates_is_always_recomputed(kind: str, always: bool, world: World) -> None:
    """Blocks with a collective or FSDP units in them are recomputed on all ranks, so that none waits for ever; also
    where the collective runs in later calls only, or the model is sharded after it ran.
    """
    assert world(recomputed, kind) == [[always] * 2] * 2


def may_communicate(block: nn.Module) -> bool:
    return has_engine_inside(block) or names_collectives(block)


def test_what_names_collectives() -> None:
    """Code that communicates in training mode only is found; layers of torch, and blocks of transformers with the
    methods that FSDP2 gives them, do not count.
    """
    assert may_communicate(nn.Sequential(nn.SyncBatchNorm(8)))
    assert not may_communicate(nn.TransformerEncoderLayer(8, 2))
    for architecture in ARCHITECTURES.values():
        for _, block in find_blocks(architecture.build(torch.float32)):
            block.__class__ = type("Sharded", (FSDPModule, type(block)), {})  # as fully_shard does
            assert not may_communicate(block)
