"""The forward and the backward pass of one training step, its batch, and what a training loop sets up before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lt_tiled.errors import SimulationError
from lt_tiled.modules.patch import is_of
from lt_tiled.namespaces import LIGHTNING


def run_step(strategy: Strategy, module: LightningModule, batch: Any, optimizer: Any) -> Tensor:
    """Run the forward and the backward pass of a step on a strategy's engine, and return the loss.

    Gradients are set to zero after the forward pass, as in Lightning. The optimizer does not step.
    """
    loss = training_loss(strategy.training_step, module, batch)
    optimizer.zero_grad()
    strategy.backward(loss, optimizer)
    return loss


def training_loss(run: Callable[..., Any], module: LightningModule, batch: Any) -> Tensor:
    """Run a module's ``training_step`` by ``run`` and return its loss, or raise ``SimulationError`` without one."""
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
    for weight in stepped_on(optimizer):
        if weight.requires_grad:
            weight.backward(torch.zeros_like(weight))
    with suppress(TypeError):  # LBFGS needs a closure, and has little state
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


# Batches


def first_batch(module: LightningModule, datamodule: LightningDataModule | None, index: int = 0) -> Any:
    """Return the first batch of the training data, or another, as ``training_step`` receives it, on the CPU."""
    loader = (module if datamodule is None else datamodule).train_dataloader()
    batches = deque(islice(CombinedLoader(loader, "max_size_cycle"), index + 1), maxlen=1)
    if not batches:
        raise SimulationError("train_dataloader() yields no batch: add data, or make batch_size smaller.")
    batch, _, _ = batches.pop()
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        overridden = datamodule is not None and not is_of(getattr(datamodule, hook), LIGHTNING)
        batch = getattr(datamodule if overridden else module, hook)(batch, 0)
    return batch


def shape_of(batch: Any) -> tuple[int, int]:
    """Return the number and the length of a batch's sequences, of its first 2D or 3D tensor; 1 and 0 without one."""
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    for tensor in tensors:
        if tensor.dim() in (2, 3):
            return tensor.shape[0], tensor.shape[1]
    return 1, 0


def with_length(batch: Any, tokens: int) -> Any:
    """Repeat or cut a batch's sequences to ``tokens``, in each dimension but the first that has the sequence length."""
    _, length = shape_of(batch)
    if not length:
        raise ValueError(
            "The batch has no tensor with two or three dimensions, so its sequences cannot be made longer: yield"
            " tensors of shape [batch, sequence] from the data, or do not set a sequence length."
        )

    def changed(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if dim and size == length != tokens:
                tensor = torch.cat([tensor] * -(-tokens // length), dim).narrow(dim, 0, tokens)
        return tensor

    return apply_to_collection(batch, Tensor, changed)
