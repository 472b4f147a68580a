"""Ranks that run modules in different ways: in one tile or several, untiled, or with hooks on one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled import Tiling, prepare, tile
from tests.engines.cells import draw, whole_weights, wrapped
from tests.engines.conftest import OnRanks
from tests.engines.kinds import Layers, Mixing
from tests.models import GatedMLP
from tests.parity import errors

pytestmark = pytest.mark.self_checks


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
