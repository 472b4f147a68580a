"""What ranks run: steps whole on each of them, and the same steps shared."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.errors import NothingFoundError
from lt_tiled.sequence_parallel.groups import Groups
from tests import second_device
from tests.parity import spread, worst_of_model
from tests.sequence_parallel.cases import CASES, Case
from tests.sequence_parallel.hybrids import wide


def value_of(output: Any) -> Tensor:
    """The loss of an output, or a scalar that depends on all of its logits."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else spread(output)
    return output.loss if output.get("loss") is not None else spread(output.logits)


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The loss, router logits and all gradients, averaged over all ranks as engines do."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # of the noise that some models draw
    output = model(**inputs)
    value = value_of(output)
    value.backward()
    found = {"loss": value.detach().clone()}
    for index, logits in enumerate(getattr(output, "router_logits", None) or []):
        found[f"router logits {index}"] = logits.detach()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(gradient)
            found[name] = gradient / dist.get_world_size()
    return found


class Counts(TorchDispatchMode):
    """Counts collectives of the package, and calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "lt_tiled":
            self.found[name] += 1
        self.found["attention"] += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def shared(
    case: str | Case, size: int = 2, policies: dict[str, Any] | None = None, device: str = "cpu"
) -> tuple[float, int, str]:
    """Compare steps that ranks share, in groups of ``size`` with sequences of their own, with whole ones.

    Losses of transformers are computed in tiles in both, and what transformers computes in float32 in float64.

    Returns:
        The greatest error, the exchanges of heads for tokens, and the message if the model is refused.
    """
    chosen = CASES[case] if isinstance(case, str) else case
    model, group = chosen.build().to(device), Groups.of_size(size).group
    batches = tree_map_only(Tensor, lambda t: t.to(device), chosen.inputs(seed=dist.get_rank() // size))
    reference, policy = copy.deepcopy(model), SequenceParallel(size, targets=chosen.targets)
    loss, errors = True, [0.0]
    try:
        lt_tiled.prepare(reference, loss=loss)
    except NothingFoundError:
        loss = False
    with wide(model):
        true = [step(reference, inputs) for inputs in batches]
        try:
            with lt_tiled.prepare(model, sequence_parallel=policy, group=group, loss=loss, **(policies or {})):
                for inputs, expected in zip(batches, true, strict=True):
                    with Counts() as counts:
                        errors.append(worst_of_model(step(model, inputs), expected))
        except ValueError as refused:
            return 0.0, 0, str(refused)
    return max(errors), counts.found["all_to_all"], ""


def shared_on_second(case: str, policies: dict[str, Any]) -> tuple[float, int, str]:
    """The same for two ranks on the device of ``tests/second_device.py``."""
    with second_device.attached():
        return shared(case, 2, policies, second_device.NAME)
