"""What a comparison does to a model: its step, its gradients in the place of its weights, and its full weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lt_tiled.modules.find import plain_name, set_rates_to_zero, unwrapped
from lt_tiled.namespaces import is_a
from lt_tiled.strategies.deepspeed import gathered
from lt_tiled.training_step.step import nothing, silence, stepped_on, training_loss


class ModuleWithStep(LightningModule):
    """Gives a plain module a ``training_step``."""

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self._step = step or _loss_of

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(self.model, batch)


def _loss_of(model: Any, batch: Any) -> Tensor:
    """Return the loss of a model's output for a batch that is a mapping, a tuple, or one argument."""
    if is_a(model, "LightningModule"):  # of pytorch_lightning
        return training_loss(model.training_step, model, batch)
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(f"{type(model).__name__} returns no loss for the batch: pass step=lambda model, batch: ...")
    return loss


def make_comparable(module: LightningModule) -> None:
    """Turn off logging, hooks that change gradients, dropout and jitter: tiles draw their own."""
    silence(module)
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    vars(module).update(dict.fromkeys(hooks, nothing))
    # Loops train in training mode, and from_pretrained returns models in evaluation mode.
    if isinstance(module, ModuleWithStep) and not unwrapped(module.model).training:
        module.model.train()
    set_rates_to_zero(module, ("drop", "jitter"))


class GradientsAsWeights(torch.optim.Optimizer):
    """Puts the gradients in the place of the weights in a step; a weight without a gradient becomes zero.

    Before, weights are changed by random numbers as large as the rounding errors of a precision ``eps``.
    """

    def __init__(self, model: nn.Module, eps: float) -> None:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not weights:
            raise ValueError("All weights are frozen, so there are no gradients to compare: train at least one weight.")
        with torch.no_grad():  # before an engine copies the weights
            for index, weight in enumerate(weights):
                _change(weight, eps, seed=index)
        super().__init__(weights, {"lr": 0.0})
        self.stepped = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight in stepped_on(self):
            if weight.grad is None:
                weight.zero_()
            else:
                weight.copy_(weight.grad.to_dense())
        self.stepped = True
        return loss


def _change(weight: nn.Parameter, eps: float, seed: int) -> None:
    """Round a weight, and replace zeros: weights before them, as in a new LoRA adapter, have no gradient to compare."""
    with gathered([weight], change=True):
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed)).to(own)  # alike on all ranks
        own.copy_(torch.where(own == 0, 0.01 * noise, own))
        own.add_(own * noise, alpha=eps / 4)  # a rounding error has a mean of eps / 4


@torch.no_grad()
def full_gradients(root: nn.Module, module: nn.Module) -> dict[str, Tensor]:
    """Return full gradients, which are weights now, by name, on the CPU, of a module that an engine made ``root`` of.

    All ranks must call it.
    """
    full = dict[str, Tensor]()
    with FullyShardedDataParallel.summon_full_params(root, writeback=False):  # does nothing to other modules
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                with gathered([weight]):
                    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
                    full[plain_name(name)] = whole.detach().cpu().clone()
    return full
