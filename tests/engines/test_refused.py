"""What engines refuse: at setup, before the first step, or in the step whose recompute computes different values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import lt_tiled
from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile
from tests.engines.cells import ENGINES, draw, error_of, launch, set_up, step_on, strategy, wrapped
from tests.engines.test_matrix import run
from tests.lit import LitTiny, replaced, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import sgd
from tests.world import OnRanks, World

# Setup


class ShardsInside(LitTiny):
    """Makes the gate projection a unit of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        for module in (*(part for block in self.net.blocks for part in (block.mlp.gate, block)), self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class TiesBlocks(LitTiny):
    """Two blocks share a weight."""

    def configure_model(self) -> None:
        super().configure_model()
        first, second = self.net.blocks
        second.mlp.down.weight = first.mlp.down.weight


def widens(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Choose the first projections of MLPs as FSDP units."""
    return recurse or (isinstance(module, nn.Linear) and module.out_features > module.in_features)


INSIDE = "net.blocks.0.mlp (GatedMLP) is tiled, and gate inside it is an FSDP unit"
AT_SETUP: dict[str, tuple[str, type[LitTiny], dict[str, Any]]] = {
    INSIDE: ("fsdp", LitTiny, {"auto_wrap_policy": widens}),
    f"{INSIDE}, all-gathered for every tile": ("fsdp2", ShardsInside, {}),
    "Blocks of TiesBlocks share a weight with each other": ("fsdp2", TiesBlocks, {}),
}


def fit_refused(engine: str, model: type[LitTiny], options: dict[str, Any]) -> tuple[str, str, list[float], int]:
    module, chosen = model(), strategy(lt_tiled, engine, tiling=4, **options)
    error = error_of(lambda: trainer(chosen, devices=dist.get_world_size()).fit(module))
    return *error, module.losses, replaced(module)


@pytest.mark.parametrize("message", AT_SETUP)
def test_trainer_refuses(message: str, world: World) -> None:
    """A unit inside a tiled module, by policy or by hand, and weights that two units share, raise before a step.

    The model is restored.
    """
    for kind, text, losses, left in world(fit_refused, *AT_SETUP[message]):
        assert (kind, losses, left) == ("ValueError", [], 0)
        assert message in text
        assert "auto_wrap_policy={MyBlock}" in text or "FSDP unit" not in text


def set_up_with_state() -> tuple[str, str]:
    net = TinyLM()
    optimizer = sgd(net.parameters())
    net(draw((2, 24), 0)).sum().backward()
    optimizer.step()
    return error_of(lambda: launch("fsdp2").setup(net, optimizer))


def test_optimizers_with_state_under_fsdp2(world: World) -> None:
    """An optimizer that has stepped before ``fabric.setup`` would lose its momentum."""
    for kind, text in world(set_up_with_state):
        assert kind == "ValueError"
        assert "not the state of an optimizer: load it afterwards" in text


def refused_by_zero3(call: str) -> tuple[str, str]:
    """The error of a model that is tiled after ZeRO-3 wrapped it, or without ``prepare``."""
    net = TinyLM()
    if call == "tile before":
        for block in net.blocks:
            tile(block.mlp)
    model, *_ = wrapped("zero3", net)
    if call == "tile after":
        for block in net.blocks:
            tile(block.mlp)
    if call == "prepare after":
        prepare(model, tiling=Tiling(4))
    return error_of(lambda: model(draw((2, 24), 0)))


@pytest.mark.parametrize("call", ["prepare after", "tile before", "tile after"])
def test_too_late_for_zero3(call: str, deepspeed_world: World) -> None:
    """A model that ZeRO-3 wraps already, and modules that ``tile`` was given alone, are refused with the remedy."""
    for kind, text in deepspeed_world(refused_by_zero3, call):
        assert kind == "ValueError"
        assert "call prepare before deepspeed.initialize" in text


# The first step


LOST = {"no hidden states": "blocks.0 (TakesIds)", "norm before": "blocks.1 (Block)"}


def first_step(name: str) -> tuple[str, str]:
    return error_of(lambda: run("zero3", "fabric", name, True))


@pytest.mark.parametrize("name", LOST)
def test_gradients_that_zero3_would_lose(name: str, deepspeed_world: World) -> None:
    """Blocks without hidden states, and blocks whose weights are used outside of them, are refused by name."""
    for error, message in deepspeed_world(first_step, name):
        assert error == "RuntimeError"
        assert message.startswith(f"{LOST[name]} has gradients that ZeRO-3 would lose")


# Any step

POLICIES: dict[str, dict[str, Any]] = {
    "tiles": {"tiling": 4, "activation_checkpointing": None},
    "blocks": {"tiling": None, "activation_checkpointing": ActivationCheckpointing("Block")},
}


def with_a_change(engine: str, policy: str, at: int) -> list[str]:
    """The error of each of three steps, before one of whose backward passes an activation function is replaced."""
    fabric, net = launch(engine, **POLICIES[policy]), TinyLM()
    mlp = net.blocks[0].mlp  # which FSDP wraps
    model, optimizer = set_up(fabric, net, engine)
    found = list[str]()
    for step in range(3):
        ids = draw((2, 24 + step), fabric.global_rank)
        act, loss = mlp.act, lm_loss(model(ids), ids)
        if step == at:
            mlp.act = torch.sin
        _, error = error_of(lambda loss=loss: step_on(fabric, optimizer, loss))
        found.append(error)
        mlp.act = act
        if error != "no error" and engine.startswith("zero"):  # DeepSpeed goes on after no exception
            break
        optimizer.zero_grad()
    fabric.strategy.release()
    return found


@pytest.mark.table("ddp-blocks|fsdp-tiles|fsdp2-(blocks|tiles)|zero2-tiles|zero3-blocks")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_recompute_of_other_values(engine: str, policy: str, on_ranks: OnRanks) -> None:
    """A recompute that computes different values raises in the step in which something changed, the first or a later
    one, and the next step is right.
    """
    for at in (0, 1):
        for errors in on_ranks(with_a_change, engine, policy, at):
            assert "computes different values" in errors.pop(at)
            assert set(errors) <= {"no error"}
