"""The forward and the backward pass of one training step, and what a training loop has set up before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lt_tiled.errors import SimulationError


def run_step(strategy: Strategy, module: LightningModule, batch: Any, optimizer: Any, zero_grad: bool = True) -> Tensor:
    """Run the forward and the backward pass of a step on a strategy's engine, and return the loss.

    Args:
        strategy: The strategy that has set up the module.
        module: The module.
        batch: The batch, on the strategy's device.
        optimizer: The optimizer; it does not step.
        zero_grad: Whether gradients are set to zero after the forward pass, as Lightning does, or accumulated.

    Raises:
        SimulationError: If ``training_step`` returns no loss.
    """
    loss = training_loss(strategy.training_step, module, batch)
    if zero_grad:
        optimizer.zero_grad()
    strategy.backward(loss, optimizer)
    return loss


def training_loss(run: Callable[..., Any], module: LightningModule, batch: Any) -> Tensor:
    """Run a module's ``training_step`` by ``run`` and return its loss.

    Raises:
        SimulationError: If it returns none.
    """
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    output = run(batch, 0) if indexed else run(batch)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        step = f"{type(module).__name__}.training_step"
        raise SimulationError(f"{step} returned {type(loss).__name__} and no loss: use automatic optimization.")
    return loss


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for example in place of ``self.log``, which needs a training loop."""


def silence(module: LightningModule) -> None:
    """Let a module log nothing, because its logging needs a training loop."""
    vars(module).update(log=nothing, log_dict=nothing)


def stepped_on(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def create_optimizer_state(optimizer: Any) -> None:
    """Create the state of an optimizer, by a step with a learning rate and gradients of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.0  # a number or a tensor
    try:
        for weight in stepped_on(optimizer):
            if weight.requires_grad:
                weight.backward(torch.zeros_like(weight))
        with suppress(TypeError):  # LBFGS needs a closure, and has little state
            optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
