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

from lt_tiled.strategies.base import TiledFabricStrategy, TiledTrainerStrategy


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


class TrainerChecksOrder(TiledTrainerStrategy):
    """Checks a full checkpoint before a Trainer's strategy loads it."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        check_order(path, weights_only, self.lightning_module, dict(enumerate(self.optimizers)))
        return super().load_checkpoint(path, weights_only)


class FabricChecksOrder(TiledFabricStrategy):
    """Checks a full checkpoint before Fabric loads it into a dictionary of the user's."""

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = self.broadcast(path)
        values = state if isinstance(state, dict) else {}
        models = [value for value in values.values() if isinstance(value, nn.Module)]
        optimizers: dict[str | int, Optimizer] = {k: v for k, v in values.items() if isinstance(v, Optimizer)}
        if len(models) == 1:  # Lightning refuses others
            check_order(path, weights_only, models[0], optimizers)
        return super().load_checkpoint(path, state, strict, weights_only)
