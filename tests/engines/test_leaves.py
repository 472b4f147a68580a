"""ZeRO-3 makes blocks with tiled modules leaf modules: which blocks it loses gradients of, and leaf modules by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from tests.engines.cells import draw, error_of, launch, strategy, train
from tests.engines.conftest import OnRanks
from tests.engines.kinds import Unusual
from tests.models import GatedMLP, H, TinyLM
from tests.parity import near
from tests.world import World


class TakesIds(Unusual):
    """Embeds tokens by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids))


class OfTokens(TinyLM):
    """Adds what blocks make of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesIds() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(ids)
        return self.head(x)


class UsesNormBefore(TinyLM):
    """Uses the norm of a block before the block runs."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.blocks[1].norm1(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiesBlocks(TinyLM):
    """Two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks
        second.mlp.down.weight = first.mlp.down.weight  # type: ignore[union-attr]


def losses(engine: str, model: Callable[[], nn.Module], own: bool = False) -> list[float]:
    """The losses of three steps; ``own`` makes the MLPs leaf modules of ZeRO-3 instead of the blocks."""
    options: dict[str, Any] = {"tiling": 4} if engine == "zero3" else {"find_unused_parameters": True, "tiling": None}
    chosen = strategy(lt_tiled.fabric, engine, activation_checkpointing=None, **options)
    if engine == "zero3":  # else a bucket may still have the weight whose gradient arrives late
        chosen.config["zero_optimization"]["reduce_bucket_size"] = 1
    fabric, net = launch(chosen), model()
    if own:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(net, [GatedMLP])
    try:
        prepared, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.5, momentum=0.9))
        return train(fabric, prepared, optimizer, [draw((2, 24), dist.get_rank())] * 3)
    finally:
        fabric.strategy.release()


def refused(model: Callable[[], nn.Module]) -> tuple[str, str]:
    return error_of(lambda: losses("zero3", model))


@pytest.mark.parametrize(
    ("model", "path"),
    [(OfTokens, "blocks.0 (TakesIds)"), (UsesNormBefore, "blocks.1 (Block)"), (TiesBlocks, "blocks.1 (Block)")],
)
def test_what_a_leaf_cannot_be(model: Callable[[], nn.Module], path: str, deepspeed_world: World) -> None:
    """Blocks whose gradients ZeRO-3 would lose are refused by name in the first step."""
    for error, message in deepspeed_world(refused, model):
        assert error == "RuntimeError"
        assert message.startswith(f"{path} has gradients that ZeRO-3 would lose")


@pytest.mark.parametrize("model", [OfTokens, UsesNormBefore])
def test_own_leaves(model: Callable[[], nn.Module], on_ranks: OnRanks) -> None:
    """Such blocks train as under DDP where the model makes its MLPs leaf modules, as the error says."""
    plain = on_ranks(losses, "ddp", model)
    assert on_ranks(losses, "zero3", model, True) == [near(each) for each in plain]
