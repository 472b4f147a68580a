"""Read full gradients from an engine, and replace weights that would leave none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from lt_tiled.modules.find import plain_name
from lt_tiled.training_step.step import stepped_on


class GradientReader(torch.optim.Optimizer):
    """Changes no weight, but can put gradients in the place of weights.

    Args:
        model: The wrapped model. Zeros of its trained weights are replaced.

    Raises:
        ValueError: If all weights are frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        # The state dict has the parts of flat weights: those of frozen ones must not be taken for gradients.
        weights = [weight for weight in model.parameters() if weight.requires_grad or isinstance(weight, FlatParameter)]
        if not weights:
            raise ValueError("All weights are frozen, so there are no gradients to compare: train at least one weight.")
        _fill_zeros(weight for weight in weights if weight.requires_grad)  # before DeepSpeed copies the weights
        super().__init__(weights, {"lr": 0.0})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.steps += 1
        return loss

    @torch.no_grad()
    def read(self, read_weights: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what ``read_weights`` returns while gradients are in the place of weights."""
        weights = stepped_on(self)
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.zero_() if weight.grad is None else weight.copy_(weight.grad)
        try:
            return read_weights()
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def deepspeed_gradients(engine: Any, module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of DeepSpeed's engine, which it has until the optimizer steps."""
    from deepspeed.utils import safe_get_full_grad

    scale = getattr(engine.optimizer, "loss_scale", 1.0)
    weights = {plain_name(name): p for name, p in module.named_parameters() if p.requires_grad}
    return {name: safe_get_full_grad(weight).cpu() / scale for name, weight in weights.items()}


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with full weights, on the CPU."""
    with _gathered(model.parameters()):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def without_untrained(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out buffers, frozen weights, and all names of a tied weight but the first."""
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    others = dict(module.named_parameters(remove_duplicate=False)).keys() - trained
    others |= dict(module.named_buffers(remove_duplicate=False)).keys()
    left_out = {plain_name(name) for name in others}
    return {name: value for name, value in state.items() if name not in left_out}


@torch.no_grad()
def _fill_zeros(weights: Iterable[Tensor]) -> None:
    """Replace zeros by small numbers: weights before zeros, as in a new LoRA adapter, have no gradient to compare."""
    for index, weight in enumerate(weights):
        random = torch.Generator().manual_seed(index)  # replicas stay alike
        with _gathered([weight], change=True):  # one by one: all may not fit on a device
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            noise = torch.normal(0.0, 0.01, own.shape, generator=random)
            own.copy_(torch.where(own == 0, noise.to(own), own))


def _gathered(weights: Iterable[Tensor], change: bool = False) -> Any:
    """All-gather weights that ZeRO-3 shards, to read them, or to change them as the first rank does."""
    sharded = [weight for weight in weights if hasattr(weight, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if change else None)
