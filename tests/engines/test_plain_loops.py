"""``prepare`` in a loop of its own, with what wraps the model called directly: it finds the engine by itself."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lt_tiled import Tiling, prepare, tile
from lt_tiled.modules.patch import Patch, get_patches
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


@pytest.mark.table("zero[123]-before|zero1-used|zero3-used|zero2-after|fsdp2-before|ddp-after")
@pytest.mark.parametrize(("engine", "when"), [(engine, when) for engine, times in WHEN.items() for when in times])
def test_losses(engine: str, when: str, on_ranks: OnRanks) -> None:
    """A prepared model has the losses of the untiled one under DDP, whatever wraps it, and whether it was prepared
    before that or after, or ran in between; also with ranks whose inputs are too short for two tiles.
    """
    plain = on_ranks.once(losses, "ddp", False, "before")
    assert on_ranks(losses, engine, True, when) == [near(each) for each in plain]


def refused_after() -> tuple[str, str]:
    net = TinyLM()
    model, *_ = wrapped("zero3", net)
    return error_of(lambda: prepare(model, tiling=Tiling(4)))


def test_prepared_after_zero3(deepspeed_world: World) -> None:
    """A model that ZeRO-3 wraps already is refused, with the remedy."""
    for kind, text in deepspeed_world(refused_after):
        assert kind == "ValueError"
        assert "call prepare before deepspeed.initialize" in text


def refused_alone(after: bool) -> tuple[str, str]:
    net = TinyLM()
    wrap = partial(wrapped, "zero3", net)
    model = wrap()[0] if after else net
    for block in net.blocks:
        tile(block.mlp)
    model = model if after else wrap()[0]
    return error_of(lambda: model(draw((2, 24), 0)))


@pytest.mark.parametrize("after", [False, True])
def test_tile_under_zero3(after: bool, deepspeed_world: World) -> None:
    """Modules that ``tile`` was given alone are refused under ZeRO-3, in one sentence with the remedy."""
    for kind, text in deepspeed_world(refused_alone, after):
        assert kind == "ValueError"
        assert "call prepare before deepspeed.initialize" in text


def of_two(release: bool) -> list[float]:
    """The losses of a model under ZeRO-3 whose blocks two calls of ``prepare`` tile, until one of them is released."""
    torch.manual_seed(0)
    net, found = TinyLM(), []
    first, second = prepare(net, tiling=Tiling(4)), prepare(net, tiling=Tiling(4, targets="blocks.*.norm1"))
    model, backward, step = wrapped("zero3", net)
    for index in range(2):
        if release and index == 1:
            first.release()
        ids = draw((2, 20), dist.get_rank())
        backward(loss := lm_loss(model(ids), ids))
        step()
        found.append(float(loss.detach()))
    first.release()
    second.release()
    assert not any(get_patches(module, Patch) for module in net.modules())
    return found


def test_one_of_two_is_released(deepspeed_world: World) -> None:
    """Tiles of a second ``prepare`` train on under ZeRO-3 when the first one's are gone."""
    assert deepspeed_world(of_two, True) == [near(each) for each in deepspeed_world(of_two, False)]


def of_copy(tiled: bool) -> list[float]:
    """The losses of a copy of a prepared model that is wrapped by another engine than the model."""
    torch.manual_seed(0)
    net = TinyLM()
    if tiled:
        prepare(net, tiling=Tiling(4))
    copy = deepcopy(net)
    model, backward, _ = wrapped("zero3", copy)
    ids = draw((2, 20), dist.get_rank())
    reference = lm_loss(net(ids), ids)
    loss = lm_loss(model(ids), ids)
    backward(loss)
    return [float(reference.detach()), float(loss.detach())]


def test_a_copy_has_its_own_engine(deepspeed_world: World) -> None:
    """A copy of a prepared model, as preference tuning makes one, is wrapped by an engine that the model is not."""
    assert deepspeed_world(of_copy, True) == [near(each) for each in deepspeed_world(of_copy, False)]


def marks(release: bool) -> set[str]:
    net = TinyLM()
    before = {name for module in net.modules() for name in vars(module)}
    prepared = prepare(net, tiling=Tiling(4), activation_checkpointing=True)
    if release:
        prepared.release()
    return {name for module in net.modules() for name in vars(module)} - before


def test_no_mark_is_left() -> None:
    """Nothing that ZeRO-3 would have read is left on a released model that it did not wrap."""
    assert "_z3_leaf" in marks(False)
    assert marks(True) == set()
