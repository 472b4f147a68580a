"""Two forward passes before one backward pass, with a change in between, on each engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

import lt_tiled
from tests.engines.cells import ENGINES, draw, launch, set_up, step_on, train
from tests.engines.conftest import OnRanks
from tests.models import Block, GatedMLP, H, TinyLM, lm_loss
from tests.parity import near
from tests.world import World

SWITCH = {"gain": 1.0}


class Settings:
    """Looked into by no observation."""

    gain = 1.0


class SwitchedMLP(GatedMLP):
    """Reads a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(H))
        self.strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.tau) * self.strength


class Switched(Block):
    """Reads what users switch, keeps a running mean, and collects a loss in a list of its class."""

    gain = 1.0
    collected: list[Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.mlp = SwitchedMLP()
        self.task, self.mean, self.mask, self.collects = "first", 0.0, torch.ones(24, 1), False
        self.scale = nn.Parameter(torch.ones(H))
        self.register_buffer("shift", torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + float(x.detach().mean())
        x = x * self.mask * self.gain * SWITCH["gain"] * self.scale * Settings.gain + self.shift + self.mean
        x = super().forward(x if self.task == "first" else x.sin())
        if self.collects:
            self.collected.append(x.square().mean())
        return x


CHANGES: dict[str, Callable[[Switched], object]] = {
    "nothing": lambda block: None,
    "collected losses": lambda block: None,
    "attribute": lambda block: setattr(block, "task", "second" if block.task == "first" else "first"),
    "attribute of the MLP": lambda block: setattr(block.mlp, "strength", block.mlp.strength * 1.5),
    "mask": lambda block: setattr(block, "mask", block.mask.flip(0) * 0.5),
    "buffer": lambda block: setattr(block, "shift", block.shift + 1),
    "buffer of the MLP": lambda block: setattr(block.mlp, "tau", block.mlp.tau * 1.5),
    "buffer in place": lambda block: block.shift.add_(1),
    "class attribute": lambda block: setattr(Switched, "gain", Switched.gain * 1.1),
    "global": lambda block: SWITCH.update(gain=SWITCH["gain"] * 1.1),
    "another class": lambda block: setattr(Settings, "gain", Settings.gain * 1.1),
    "frozen weight": lambda block: block.scale.requires_grad_(not block.scale.requires_grad),
}
IN_PLACE, OTHER, SHARDED = (
    r"Switched\.shift of shape \[16\] was changed in place",
    r"its recompute computes other values",
    "was sharded again by FSDP",
)
FREEZES = ("ddp", "fsdp", "fsdp2")
"""The engines that let weights be frozen between two forward passes."""
POLICIES: dict[str, dict[str, Any]] = {
    "untiled": {"tiling": None, "activation_checkpointing": None},
    "tiles": {"tiling": 4, "activation_checkpointing": None},
    "activation_checkpointing": {"tiling": None, "activation_checkpointing": True},
    "both": {"tiling": 4, "activation_checkpointing": True},
}


def switched(engine: str, policies: str) -> dict[str, list[float] | str]:
    """The losses of three steps with each change, or the error."""
    found: dict[str, list[float] | str] = {}
    for name, change in CHANGES.items():
        Switched.gain = SWITCH["gain"] = Settings.gain = 1.0
        fabric = launch(engine, **POLICIES[policies])
        net = TinyLM()
        net.blocks = nn.ModuleList([Switched(), Switched()])
        blocks = list(net.blocks)
        model, optimizer = set_up(fabric, net, engine, lambda ps: torch.optim.SGD(ps, 0.1))
        losses = []
        try:
            for step in range(3):
                Switched.collected.clear()
                first = lm_loss(model(ids := draw((2, 24), step)), ids)
                for block in blocks:
                    change(block)
                    block.collects = name == "collected losses"
                second = lm_loss(model(ids := draw((2, 24), step + 10)), ids)
                loss = first + 2 * second + sum(Switched.collected)
                losses.append(step_on(fabric, optimizer, loss))
            found[name] = losses
        except Exception as error:
            found[name] = str(error)
        finally:
            fabric.strategy.release()
    return found


@pytest.mark.table("(ddp|fsdp2|zero2|zero3)-both|fsdp-activation_checkpointing|zero1-tiles")
@pytest.mark.parametrize("policies", ["tiles", "activation_checkpointing", "both"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_change_between_two_forward_passes(engine: str, policies: str, on_ranks: OnRanks) -> None:
    """The losses are those of the untiled run on the same engine. Refused by name are, with checkpointing, a buffer
    that changes in place and an attribute of a class that is no module, and under FSDP2 collected losses.
    """
    true, found = on_ranks.once(switched, engine, "untiled"), on_ranks(switched, engine, policies)
    refused = {} if policies == "tiles" else {"buffer in place": IN_PLACE, "another class": OTHER}
    refused |= {"collected losses": SHARDED} if refused and engine == "fsdp2" else {}
    for plain, tiled in zip(true, found, strict=True):
        fails = {name for name, losses in plain.items() if isinstance(losses, str)}
        assert fails == (set() if engine in FREEZES else {"frozen weight"})
        for name in CHANGES.keys() - fails:
            if name in refused:
                assert re.search(refused[name], str(tiled[name]))
            else:
                assert tiled[name] == near(plain[name]), name


def late(ids: list[Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The later of two calls gets its gradient through the product with the earlier one."""
    return loss(ids[0]) * loss(ids[1])


def no_gradient(ids: list[Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """DPO's, with a reference that takes no gradient between the two calls."""
    chosen = loss(ids[0])
    with torch.no_grad():
        reference = loss(ids[1])
    return F.softplus(chosen - loss(ids[2]) - reference)


LOSSES: dict[str, Callable[[list[Tensor], Callable[[Tensor], Tensor]], Tensor]] = {
    "two calls": lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]),
    "three calls": lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]) + loss(ids[2]),
    "product": late,
    "no gradient between": no_gradient,
    "first is unused": lambda ids, loss: 0 * loss(ids[0]).detach() + loss(ids[1]),
    "last is unused": lambda ids, loss: loss(ids[0]) + 0 * loss(ids[1]).detach(),
}


def calls(engine: str, policies: str) -> dict[str, list[float]]:
    """The losses of three steps with several calls of a model each."""
    found = {}
    for name, of_calls in LOSSES.items():
        fabric = launch(engine, **POLICIES[policies])
        model, optimizer = set_up(fabric, TinyLM(), engine, lambda ps: torch.optim.SGD(ps, 0.5))
        losses = []
        for step in range(3):
            batches = [draw((2, length), 2 * step + dist.get_rank()) for length in (24, 20, 28)]
            loss = of_calls(batches, lambda ids, model=model: lm_loss(model(ids), ids))  # type: ignore[misc]
            losses.append(step_on(fabric, optimizer, loss))
        found[name] = losses
        fabric.strategy.release()
    return found


@pytest.mark.table("tiles|both")
@pytest.mark.parametrize("policies", ["untiled", "tiles", "activation_checkpointing", "both"])
def test_several_calls_under_zero3(policies: str, on_ranks: OnRanks) -> None:
    """The losses are those of DDP whichever calls of a model the backward pass goes through."""
    plain, found = on_ranks.once(calls, "ddp", "untiled"), on_ranks(calls, "zero3", policies)
    assert found == [{name: near(losses) for name, losses in of_rank.items()} for of_rank in plain]


def by_hand(tiled: bool) -> list[float]:
    """The losses of a model under ZeRO-3 that ``prepare`` tiled and checkpointed, without a strategy that knows it."""
    from deepspeed.utils import set_z3_leaf_modules

    fabric = launch("zero3", **POLICIES["untiled"])
    net = TinyLM()
    set_z3_leaf_modules(net, [Block])
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    with lt_tiled.prepare(net, tiling=4, activation_checkpointing=True) if tiled else nullcontext():
        losses = train(fabric, model, optimizer, [draw((2, 24), step) for step in range(3)])
    fabric.strategy.release()
    return losses


def test_prepared_by_hand_under_zero3(deepspeed_world: World) -> None:
    """What ZeRO-3 keeps on modules between the passes is no change, also where no strategy tells of it."""
    plain, tiled = deepspeed_world(by_hand, False), deepspeed_world(by_hand, True)
    assert tiled == [near(losses) for losses in plain]


def adapters(engine: str, policies: str) -> list[float]:
    """The losses of three steps in which the active LoRA adapter is another one in the second forward pass."""
    fabric = launch(engine, **POLICIES[policies])
    config = LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    net = get_peft_model(TinyLM(), config)
    net.add_adapter("other", config)
    for name, weight in net.named_parameters():
        weight.requires_grad_("lora_" in name)  # of both
    model, optimizer = set_up(fabric, net, engine, lambda ps: torch.optim.SGD(ps, 0.1))
    losses = []
    for step in range(3):
        loss: Any = 0.0
        for weight, adapter in ((1, "default"), (2, "other")):
            for part in net.modules():
                if isinstance(part, BaseTunerLayer):
                    part._active_adapter = [adapter]  # as set_adapter, which also freezes the others
            loss = loss + weight * lm_loss(model(ids := draw((2, 24), step + weight)), ids)
        losses.append(step_on(fabric, optimizer, loss))
    fabric.strategy.release()
    return losses


@pytest.mark.table("(ddp|zero2)-both")
@pytest.mark.parametrize("policies", ["tiles", "activation_checkpointing", "both"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2"])
def test_another_adapter_in_the_second_forward_pass(engine: str, policies: str, on_ranks: OnRanks) -> None:
    """The losses are those of the untiled run where PEFT's active adapter changes between two forward passes."""
    true, found = on_ranks.once(adapters, engine, "untiled"), on_ranks(adapters, engine, policies)
    assert found == [near(losses) for losses in true]
