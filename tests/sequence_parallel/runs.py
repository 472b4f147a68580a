"""What ranks run: a step whole on each of them, and the same step shared."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from lt_tiled import SequenceParallel
from tests.parity import spread
from tests.sequence_parallel.models import CASES


def value_of(output: Any) -> Tensor:
    """The loss of an output, or a scalar that depends on all of its logits."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else spread(output)
    return output.loss if output.get("loss") is not None else spread(output.logits)


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and all gradients, averaged over all ranks as engines do."""
    model.zero_grad(set_to_none=True)
    value = value_of(model(**inputs))
    value.backward()
    found = {"loss": value.detach().clone()}
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        found[name] = gradient / dist.get_world_size()
    return found


def worst(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The greatest error relative to the norm; of a gradient without one, relative to the greatest."""
    largest = max(float(t.norm()) for t in true.values())
    return max(float((found[n] - true[n]).norm()) / max(float(true[n].norm()), 1e-3 * largest) for n in true)


def errors(
    names: list[str], size: int, options: dict[str, Any] | None = None, policies: dict[str, Any] | None = None
) -> dict[str, float]:
    """The errors of these cases, where groups of ``size`` ranks share the sequences of their own.

    Losses of transformers are computed in tiles in both, because its own loss function rounds to float32.
    """
    group, _ = dist.new_subgroups(size)
    found = {}
    for name in names:
        case = CASES[name]
        model = case.build()
        inputs = case.inputs(seed=dist.get_rank() // size)
        loss = {"loss": hasattr(model, "loss_function")}
        reference = copy.deepcopy(model)
        if loss["loss"]:
            lt_tiled.prepare(reference, **loss)
        true = step(reference, inputs)
        policy = SequenceParallel(size, **(options or {}))
        with lt_tiled.prepare(model, sequence_parallel=policy, group=group, **loss, **(policies or {})):
            found[name] = worst(step(model, inputs), true)
    return found
