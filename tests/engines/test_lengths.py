"""Ranks that run modules in different ways: in one tile or several, untiled, or with hooks on one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled import Tiling, prepare, tile
from tests.engines.cells import draw, error_of, launch, set_up, step_on, whole_weights, wrapped
from tests.engines.conftest import OnRanks
from tests.engines.kinds import Layers, Mixing, of_lengths
from tests.models import GatedMLP
from tests.parity import errors
from tests.world import World

pytestmark = pytest.mark.self_checks


def orders(engine: str, lengths: tuple[int, int]) -> list[list[str]]:
    """The names of the weights as the gradients of each of three steps arrived, with each length on each rank."""
    fabric, net = launch(engine), Layers()
    model, optimizer = set_up(fabric, net, engine)
    arrived: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    found = []
    for step in range(3):
        step_on(fabric, optimizer, of_lengths(*lengths)(model, step, dist.get_rank()))
        found.append(arrived.copy())
        arrived.clear()
    fabric.strategy.release()
    return found


@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_the_order_of_the_gradients(engine: str, on_ranks: OnRanks) -> None:
    """Under ZeRO-1 and 2, gradients arrive in one order on every rank, in as many tiles as its length gives."""
    for lengths in ((4096, 512), (1, 4096)):
        first, second = on_ranks(orders, engine, lengths)
        assert first == second == [first[0]] * 3
        assert len(first[0]) == len(set(first[0])) == 25


def prepared(net: Layers) -> None:
    prepare(net, tiling=Tiling(4))


def tiled(net: Layers) -> None:
    for block in net.blocks:
        tile(block.mlp, 4)


def hooked(net: Layers) -> None:
    """Watch modules on rank 0 alone, as W&B does."""
    if dist.get_rank() == 0:
        net.blocks[0].mlp.up.register_forward_hook(lambda *_: None)
        net.blocks[1].pre_mlp_norm.register_forward_hook(lambda *_: None)


def loses_early(net: Layers) -> None:
    """Take a loss from the embedding on rank 0 alone, whose nodes wait until the end of the backward pass."""
    for block in net.blocks:
        block.mlp = GatedMLP(bias=True)
    if dist.get_rank() == 0:
        net.embed.register_forward_hook(lambda _, args, output: net.early.append(output.square().mean()))


def mixing(net: Layers) -> None:
    for block in net.blocks:
        block.mlp = Mixing()


DECISIONS: dict[str, tuple[list[Any], tuple[int, int]]] = {
    # what is done to the model, and the tokens of each rank
    "lengths": ([tiled], (48, 3)),
    "one token": ([prepared], (48, 1)),
    "a hook, with norms": ([hooked, prepared], (48, 48)),
    "an early loss": ([loses_early, prepared], (48, 3)),
    "a self-check that fails": ([mixing, prepared], (48, 1)),
}


def one_step(stage: str, decision: str, tiles: bool) -> dict[str, Tensor]:
    """The weights after a step in which ranks run modules in different ways."""
    changes, lengths = DECISIONS[decision]
    torch.manual_seed(0)
    net = Layers()
    for change in changes:
        if tiles or change not in (tiled, prepared):
            change(net)
    model, backward, step = wrapped(stage, net)
    ids = draw((1, lengths[dist.get_rank()]), dist.get_rank())
    loss = model(ids).square().mean()
    backward(loss + sum(net.early))
    step()
    return whole_weights(model, net)


@pytest.mark.table("zero2-.*")
@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_what_one_rank_decides(stage: str, decision: str, on_ranks: OnRanks) -> None:
    """Under DeepSpeed without a strategy, a step is the untiled one whatever each rank's own input, hooks and
    self-checks decide.
    """
    untiled, found = (on_ranks(one_step, stage, decision, tiles) for tiles in (False, True))
    for true, weights in zip(untiled, found, strict=True):
        assert max(errors(weights, true).values()) < 1e-5


class Communicates(GatedMLP):
    """Scales tokens by a number that all ranks exchange in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.gate.weight.detach().mean() * (1 + dist.get_rank())
        dist.all_reduce(scale)
        return super().forward(x) * (1 + scale)


def communicating(named: bool | None) -> tuple[dict[str, Tensor], str]:
    """The gradients of a step on 48 and 20 tokens, 3 and 2 tiles, and the error of a module that a user named."""
    torch.manual_seed(0)
    net = Layers()
    for block in net.blocks:
        block.mlp = Communicates()
        if named:
            tile(block.mlp, tile_tokens=16)
    if named is False:
        prepare(net, tiling=Tiling(tile_tokens=16))
    ids = draw((1, (48, 20)[dist.get_rank()]), dist.get_rank())
    _, said = error_of(lambda: net(ids).square().mean().backward())
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, said


def test_what_communicates_stays_untiled(world: World) -> None:
    """A module in which ranks exchange something runs untiled, or is refused where a user named it, and none waits."""
    untiled, prepared_alone, named = (world(communicating, each) for each in (None, False, True))
    for (true, _), (found, _), (_, said) in zip(untiled, prepared_alone, named, strict=True):
        assert found.keys() == true.keys() != set()
        assert max(errors(found, true).values()) < 1e-5
        assert "communicates with other ranks in its forward" in said
