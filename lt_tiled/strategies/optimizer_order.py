"""Refuse full checkpoints whose optimizer states FSDP would give to other weights.

The optimizer states of a checkpoint of one device or DDP are numbered in the order of the optimizer's parameter groups.
When FSDP loads it, Lightning reads the numbers in the order of the model's weights, frozen ones included:
``_rekey_optimizer_state_if_needed`` in ``lightning/fabric/strategies/model_parallel.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def check_order(path: Any, weights_only: bool | None, model: nn.Module, optimizers: dict[str | int, Optimizer]) -> None:
    """Check a full checkpoint before FSDP loads it.

    Args:
        path: The checkpoint, the same on all ranks.
        weights_only: As ``torch.load`` takes it.
        model: The model that is wrapped.
        optimizers: The optimizers, by their keys in Fabric's checkpoint, or by their numbers in that of a Trainer.

    Raises:
        ValueError: If the optimizer states are in another order than the weights.
    """
    if not Path(path).is_file() or not optimizers:  # in a sharded checkpoint states have names
        return
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    states = checkpoint.get("optimizer_states", [])
    places = {weight: place for place, weight in enumerate(model.parameters())}
    for key, optimizer in optimizers.items():
        saved = checkpoint[key] if isinstance(key, str) else states[key]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        own = [places.get(weight) for group in optimizer.param_groups for weight in group["params"]]
        if numbers == [*range(len(numbers))] and own != [*range(len(own))]:
            raise ValueError(
                f"{Path(path).name} numbers its optimizer states by parameter groups, which have another order than"
                f" the weights of {type(model).__name__}: resume with the strategy that saved it, or save it sharded."
            )


def check_order_of_fabric(path: Any, weights_only: bool | None, state: Any) -> None:
    """Check a full checkpoint before Fabric loads it into a dictionary of the user's."""
    if not isinstance(state, dict):
        return
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers: dict[str | int, Optimizer] = {k: value for k, value in state.items() if isinstance(value, Optimizer)}
    if len(models) == 1:  # Lightning refuses others
        check_order(path, weights_only, models[0], optimizers)
