"""``prepare`` in a loop of its own, with what wraps the model called directly: it finds the engine by itself."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lt_tiled import Tiling, prepare, tile
from tests.engines.cells import ENGINES, draw, error_of, wrapped
from tests.engines.conftest import OnRanks
from tests.models import TinyLM, lm_loss
from tests.parity import near
from tests.world import World


def losses(engine: str, tiled: bool, when: str) -> list[float]:
    """The losses of three steps on inputs whose lengths differ between the ranks: ``before`` or ``after`` wrapping, or
    before it and ``used`` in between.
    """
    torch.manual_seed(0)
    net = TinyLM()

    def tile(model: nn.Module) -> None:
        prepare(model, tiling=Tiling(4), activation_checkpointing=True)

    if tiled and when != "after":
        tile(net)
    if when == "used":
        lm_loss(net(ids := draw((2, 24), 0)), ids).backward()
        net.zero_grad()
    model, backward, step = wrapped(engine, net)
    if tiled and when == "after":
        tile(model)
    found = []
    for index in range(3):
        ids = draw((2, (20 + index, 2)[dist.get_rank()]), 2 * index + dist.get_rank())
        loss = lm_loss(model(ids), ids)
        backward(loss)
        step()
        found.append(float(loss.detach()))
    return found


WHEN = {engine: ("before", "used", "after") for engine in ENGINES if engine not in ("fsdp", "fsdp_flat", "zero3")}
WHEN |= dict.fromkeys(("fsdp", "fsdp_flat", "zero3"), ("before", "used"))


@pytest.mark.table("zero[12]-before|zero3-used|zero2-after|fsdp2-before|ddp-after")
@pytest.mark.parametrize(("engine", "when"), [(engine, when) for engine, times in WHEN.items() for when in times])
def test_losses(engine: str, when: str, on_ranks: OnRanks) -> None:
    """A prepared model has the losses of the untiled one under DDP, whatever wraps it, and whether it was prepared
    before that or after, or ran in between; also with ranks whose inputs are too short for two tiles.
    """
    plain = on_ranks.once(losses, "ddp", False, "before")
    assert on_ranks(losses, engine, True, when) == [near(each) for each in plain]


def refused(call: str) -> tuple[str, str]:
    """What is said where a model was tiled without ZeRO-3 in sight, or after it was wrapped."""
    net = TinyLM()
    if call == "tile before":
        for block in net.blocks:
            tile(block.mlp)
    model, *_ = wrapped("zero3", net)
    if call == "tile after":
        for block in net.blocks:
            tile(block.mlp)
    if call == "prepare after":
        return error_of(lambda: prepare(model, tiling=Tiling(4)))
    return error_of(lambda: model(draw((2, 24), 0)))


@pytest.mark.parametrize("call", ["prepare after", "tile before", "tile after"])
def test_refused_under_zero3(call: str, deepspeed_world: World) -> None:
    """A model that ZeRO-3 wraps already, and modules that ``tile`` was given alone, are refused in one sentence with
    the remedy.
    """
    for kind, text in deepspeed_world(refused, call):
        assert kind == "ValueError"
        assert "call prepare before deepspeed.initialize" in text


def of_copy(tiled: bool) -> list[float]:
    """The losses of a prepared model, and of a copy of it that ZeRO-3 wraps, until a first ``prepare`` is released."""
    torch.manual_seed(0)
    net = TinyLM()
    prepared = [prepare(net, tiling=Tiling(4)), prepare(net, tiling=Tiling(4, targets="blocks.*.norm1"))]
    if not tiled:
        for one in prepared:
            one.release()
    copy = deepcopy(net)
    model, backward, step = wrapped("zero3", copy)
    ids = draw((2, 20), dist.get_rank())
    found = [float(lm_loss(net(ids), ids).detach())]
    prepared[0].release()
    for _ in range(2):
        backward(loss := lm_loss(model(ids), ids))
        step()
        found.append(float(loss.detach()))
    return found


def test_a_copy_has_its_own_engine(deepspeed_world: World) -> None:
    """A copy of a prepared model, as preference tuning makes one, is wrapped by an engine that the model is not, and
    trains in tiles when the model is released.
    """
    assert deepspeed_world(of_copy, True) == [near(each) for each in deepspeed_world(of_copy, False)]
