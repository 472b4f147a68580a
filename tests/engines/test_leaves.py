"""What blocks take, return and share under ZeRO-3, where those with tiled modules are leaf modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from tests.engines.cells import draw, error_of, launch, strategy, train
from tests.engines.conftest import OnRanks
from tests.models import Block, GatedMLP, H, TinyLM
from tests.parity import near
from tests.world import World


class Crosses(Block):
    """Adds a state that follows an argument which is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H, H)

    def forward(self, x: Tensor, mask: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        return super().forward(x) if state is None else super().forward(x + self.project(state))


class Shares(Block):
    """Reads and writes a dict of the caller."""

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x + shared["last"] if shared else x)
        shared["last"] = x * 0.5
        return x


class ReturnsDict(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}


class ReturnsWeight(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.norm2.weight


class TakesTuple(Block):
    def forward(self, inputs: tuple[Tensor, None]) -> Tensor:  # type: ignore[override]
        return super().forward(inputs[0])


class ByKeyword(Block):
    """Calls its MLP with a keyword, after a tensor that wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MaskedMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(mask=(x > 0).float(), hidden=self.norm2(x))


class MaskedMLP(GatedMLP):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * mask


class HasUnused(Block):
    """Has a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H, H)


class TakesIds(Block):
    """Embeds tokens by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids))


class OfBlocks(TinyLM):
    """Blocks of one class after an embedding; ``call`` runs one block."""

    def __init__(self, kind: type[Block], frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.state = nn.Linear(H, H)
        self.embed.requires_grad_(not frozen)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        state, shared = self.state(x), {}  # type: ignore[var-annotated]
        for block in self.blocks:
            if isinstance(block, TakesIds):
                x = x + block(ids)
                continue
            args: Any = (x, None) if isinstance(block, TakesTuple) else x
            named = {Crosses: {"state": state}, Shares: {"shared": shared}}.get(type(block), {})
            x = block(args, **named)
            if isinstance(x, dict):
                x = x["hidden"]
            elif isinstance(x, tuple):
                x = x[0] * x[1]
        return self.head(x + state)


class UsesNormBefore(OfBlocks):
    """Uses the norm of a block before the block runs."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.blocks[1].norm1(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RunsTwice(OfBlocks):
    """Runs its blocks twice."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class TiesBlocks(OfBlocks):
    """Two blocks share a weight."""

    def __init__(self, kind: type[Block], frozen: bool = False) -> None:
        super().__init__(kind, frozen)
        first, second = self.blocks
        second.mlp.down.weight = first.mlp.down.weight  # type: ignore[union-attr]


def losses(engine: str, model: type[OfBlocks], kind: type[Block], frozen: bool = False, own: bool = False) -> Any:
    """The losses of three steps; ``own`` makes the MLPs leaf modules of ZeRO-3 instead of the blocks."""
    options: dict[str, Any] = {}
    if engine == "ddp":
        options = {"find_unused_parameters": True, "tiling": None}
    chosen = strategy(lt_tiled.fabric, engine, **{"tiling": 4, "activation_checkpointing": None} | options)
    if engine == "zero3":  # else a bucket may still have the weight whose gradient arrives late
        chosen.config["zero_optimization"]["reduce_bucket_size"] = 1
    fabric = launch(chosen)
    net = model(kind, frozen)
    if own:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(net, [GatedMLP])
    trained = [p for p in net.parameters() if p.requires_grad]
    try:
        prepared, optimizer = fabric.setup(net, torch.optim.SGD(trained, 0.5, momentum=0.9))
        return train(fabric, prepared, optimizer, [draw((2, 24), dist.get_rank())] * 3)
    finally:
        fabric.strategy.release()


@pytest.mark.table("Block-True|(Crosses|HasUnused|ReturnsDict|ReturnsWeight|ByKeyword)-False|TakesTuple-True")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [Block, Crosses, Shares, HasUnused, TakesTuple, ReturnsDict, ReturnsWeight, ByKeyword])
def test_what_blocks_take_use_and_return(kind: type[Block], frozen: bool, on_ranks: OnRanks) -> None:
    """Blocks train as under DDP wherever their hidden states are in what they take and return, whatever is beside
    them, such as one of their weights, with weights that they do not use, and also if the hidden states need no
    gradient.
    """
    plain = on_ranks(losses, "ddp", OfBlocks, kind, frozen)
    assert on_ranks(losses, "zero3", OfBlocks, kind, frozen) == [near(each) for each in plain]


def refused(model: type[OfBlocks], kind: type[Block]) -> tuple[str, str]:
    return error_of(lambda: losses("zero3", model, kind))


@pytest.mark.parametrize(
    ("model", "kind", "path"),
    [
        (OfBlocks, TakesIds, "blocks.0 (TakesIds)"),
        (UsesNormBefore, Block, "blocks.1 (Block)"),
        (TiesBlocks, Block, "blocks.1 (Block)"),
    ],
)
def test_what_a_leaf_cannot_be(model: type[OfBlocks], kind: type[Block], path: str, deepspeed_world: World) -> None:
    """Blocks whose gradients ZeRO-3 would lose are refused by name in the first step."""
    for error, message in deepspeed_world(refused, model, kind):
        assert error == "RuntimeError"
        assert message.startswith(f"{path} has gradients that ZeRO-3 would lose")


@pytest.mark.parametrize(
    ("model", "kind", "own"),
    [(OfBlocks, TakesIds, True), (UsesNormBefore, Block, True), (RunsTwice, Block, True), (RunsTwice, Block, False)],
)
def test_own_leaves(model: type[OfBlocks], kind: type[Block], own: bool, on_ranks: OnRanks) -> None:
    """Such blocks train as under DDP where the model makes its MLPs leaf modules, as the error says; blocks that run
    twice also do so without.
    """
    plain = on_ranks.once(losses, "ddp", model, kind)
    assert on_ranks(losses, "zero3", model, kind, False, own) == [near(each) for each in plain]
