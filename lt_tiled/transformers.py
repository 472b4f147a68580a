"""Tiles and activation checkpointing in the Trainer of transformers and those made from it, such as TRL's."""

from __future__ import annotations

from typing import Any

import rich
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lt_tiled._log import inform
from lt_tiled._prepare import AppliesPolicies
from lt_tiled.cli.numbers import PositiveInt
from lt_tiled.policies import ActivationCheckpointingLike, SequenceParallel, Tiling
from lt_tiled.sequence_parallel.groups import Groups


class TiledCallback(AppliesPolicies, TrainerCallback):
    """Prepares the model of a Trainer before its engine wraps it, for ``Trainer(callbacks=[TiledCallback()])``.

    ``evaluate`` and ``predict`` are tiled too, before and after training; :meth:`release` restores the model. At the
    end of training, the first rank prints what was tiled and recomputed.

    Args:
        tiling: What runs tile by tile: ``True``, a number of tiles, or a policy; ``False`` and ``None`` turn it off.
        activation_checkpointing: Which blocks are recomputed, and where their inputs are offloaded to. It takes the
            place of ``TrainingArguments(gradient_checkpointing=True)``, which is turned off.
        loss: Whether transformers models compute their loss in tiles: ``True``, or how many tiles.
        sequence_parallel: How the ranks share each sequence: a policy or their number. The Trainer needs a data loader
            of :func:`share_batches`.

    Raises:
        ValueError: If a policy is not understood.
    """

    def __init__(
        self,
        tiling: bool | PositiveInt | Tiling | None = True,
        activation_checkpointing: ActivationCheckpointingLike | None = True,
        loss: bool | PositiveInt | None = None,
        sequence_parallel: PositiveInt | SequenceParallel | None = None,
    ) -> None:
        self.set_policies(tiling, activation_checkpointing, loss, sequence_parallel)
        asked = {"tiling": tiling is True, "activation_checkpointing": activation_checkpointing is True}
        self.defaults = [name for name, is_default in asked.items() if is_default]

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self.activation_checkpointing is not None and args.gradient_checkpointing:
            inform("gradient_checkpointing=True is turned off: lt_tiled applies activation checkpointing to the blocks")
            args.gradient_checkpointing = False
        if self.sequence_parallel is not None and self.sequence_parallel.size > 1:
            self.sequence_group = Groups.of_size(self.sequence_parallel.size).group
        self.prepared.release()
        self.prepared.add(model, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Raise ``RuntimeError`` if the Trainer trains another model than it was made with."""
        prepared = [p.model for p in self.prepared]
        if not any(part is known for part in model.modules() for known in prepared):
            raise RuntimeError(
                f"TiledCallback has not prepared this {type(model).__name__}, which the Trainer has wrapped already:"
                " pass the callback to Trainer(callbacks=[...]) instead of add_callback, and model= instead of"
                " model_init=."
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.prepared.free_buffers()
        if state.is_world_process_zero:
            for prepared in self.prepared:
                rich.print(prepared.report().table())


def share_batches(loader: DataLoader[Any], size: int, **kwargs: Any) -> DataLoader[Any]:
    """Prepare a data loader for sequence parallelism: the ranks that share sequences get the same batches.

    ``accelerator.prepare`` and the Trainer take the result as it is. Seed torch alike on all ranks before.

    Args:
        loader: A data loader of torch.
        size: The number of consecutive ranks that share each sequence.
        **kwargs: More arguments of Accelerate's ``prepare_data_loader``.

    Raises:
        ValueError: If the size does not divide the number of ranks.
    """
    groups = Groups.of_size(size)
    places = {"num_processes": groups.count, "process_index": groups.index}
    options = {"put_on_device": True, "use_seedable_sampler": True, "dispatch_batches": False, **kwargs}
    shared: DataLoader[Any] = prepare_data_loader(loader, PartialState().device, **places, **options)
    shared._is_accelerate_prepared = True  # accelerator.prepare would divide it again
    return shared
