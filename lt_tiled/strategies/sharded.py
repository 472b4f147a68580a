"""What FSDP and FSDP2 have in common: which blocks become units, and which full checkpoints they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lt_tiled._log import warn
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.recompute.blocks import find_checkpointable
from lt_tiled.strategies.base import TiledStrategy


class ShardedStrategy(TiledStrategy):
    """Shards blocks as units by default, and checks the order of optimizer states in full checkpoints."""

    lightning_module: Any
    optimizers: Any

    def blocks_to_shard(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model, each of which becomes an FSDP unit by default."""
        blocks = find_blocks(model)
        policy = self.activation_checkpointing
        if not blocks and policy is not None and policy.targets != "auto":
            blocks = find_checkpointable(model, policy)
        if not blocks:
            warn(
                f"{type(model).__name__} has no recognizable blocks and becomes one FSDP unit, so all its weights are"
                " all-gathered at once: name its blocks in ActivationCheckpointing(targets=...), or shard it yourself"
                " (auto_wrap_policy, fully_shard)."
            )
        return [block for _, block in blocks]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Check a full checkpoint before Lightning loads it. In a sharded one, optimizer states have names.

        Raises:
            ValueError: If the optimizer states are in another order than the weights, or missing.
        """
        # 1. As Fabric and Trainer give it. All ranks must read what the first one names.
        given = kwargs.get("path") or args[0]
        path = Path(self.broadcast(given))  # type: ignore[attr-defined]
        # 2. A file is a full checkpoint. Fabric may load a model's weights alone, which have no order.
        state = kwargs.get("state")
        if path.is_file() and ("state" not in kwargs or isinstance(state, dict)):
            checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=kwargs.get("weights_only"))
            if state is None:  # Trainer: its checkpoint has a list of states, in the order of its optimizers
                saved = checkpoint.get("optimizer_states", [])
                if not saved and self.optimizers and self.lightning_module.trainer.state.fn == "fit":
                    raise ValueError(f"{path.name} has no optimizer states to resume: load its weights before fit().")
                state = {"model": self.lightning_module}
                state.update(enumerate(self.optimizers))
                checkpoint.update(enumerate(saved))
            _check_order(path.name, checkpoint, state)
        return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]


def _check_order(file: str, checkpoint: dict[Any, Any], state: dict[Any, Any]) -> None:
    """Raise ``ValueError`` if Lightning would give the saved states of an optimizer to other weights.

    The optimizer states of one device or DDP are numbered in the order of the optimizer's parameter groups. Lightning
    reads the numbers in the order of the model's weights, frozen ones included: ``_rekey_optimizer_state_if_needed`` in
    ``lightning/fabric/strategies/model_parallel.py``.
    """
    # 1. The number that Lightning takes for each weight.
    places: dict[nn.Parameter, int] = {}
    for model in state.values():
        if isinstance(model, nn.Module):
            places.update((weight, place) for place, weight in enumerate(model.parameters()))
    for key, optimizer in state.items():
        if not isinstance(optimizer, Optimizer) or key not in checkpoint:
            continue
        # 2. The numbers of the weights in the order of the groups: in the file, and those that Lightning would take.
        saved: list[int] = []
        read: list[int | None] = []
        for group in checkpoint[key]["param_groups"]:
            saved += group["params"]
        for group in optimizer.param_groups:
            read += [places.get(weight) for weight in group["params"]]
        # 3. FSDP numbers them by the model, so only a file of other engines counts from 0 to the end.
        if saved == list(range(len(saved))) and read != list(range(len(read))):
            raise ValueError(
                f"{file} numbers its optimizer states by parameter groups, which have another order than the weights"
                " of the model: resume with the strategy that saved it, or save it sharded."
            )
