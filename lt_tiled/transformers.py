"""Tiles and activation checkpointing in the Trainer of transformers and those made from it, such as TRL's."""

from __future__ import annotations

from typing import Any, Literal

from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lt_tiled._log import inform
from lt_tiled._prepare import AppliesPolicies
from lt_tiled.policies import ActivationCheckpointingLike, SequenceParallel, Tiling
from lt_tiled.report import Report, show
from lt_tiled.sequence_parallel.groups import Groups


class TiledCallback(AppliesPolicies, TrainerCallback):
    """Prepares the model of a Trainer before its engine wraps it: ``Trainer(..., callbacks=[TiledCallback()])``.

    At the end of training, the first rank prints a report, and the model is restored. After an exception, call
    :meth:`release`.

    Args:
        tiling: As in the strategies.
        activation_checkpointing: As in the strategies. It replaces
            ``TrainingArguments(activation_checkpointing=True)``.
        loss: As in the strategies. With ``"always"``, ``compute_metrics`` gets no logits. Trainers of TRL tile their
            losses themselves.
        sequence_parallel: As in the strategies. The Trainer needs a data loader of :func:`share_batches`.

    Raises:
        ValueError: If the Trainer will replicate the model with ``nn.DataParallel``.
        RuntimeError: If the Trainer trains another model than it was made with.
    """

    def __init__(
        self,
        tiling: bool | int | Tiling | None = True,
        activation_checkpointing: ActivationCheckpointingLike | None = True,
        loss: bool | int | Literal["always"] | None = None,
        sequence_parallel: int | SequenceParallel | None = None,
    ) -> None:
        self.set_policies(tiling, activation_checkpointing, loss, sequence_parallel)
        self.report: Report | None = None
        """The report, from the end of training on."""
        self._model: nn.Module | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"The Trainer will replicate the model on {args.n_gpu} GPUs with nn.DataParallel, which TiledCallback"
                " does not support. Start one process per GPU with torchrun or accelerate launch, or show one GPU with"
                " CUDA_VISIBLE_DEVICES."
            )
        # The Trainer's own activation checkpointing, under its name and the one that it had before.
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if self.activation_checkpointing is not None and getattr(args, name, False):
                setattr(args, name, False)
                inform(f"{name}=True is turned off: lt_tiled applies activation checkpointing to the blocks")
        self.release()
        self._model = model
        self.prepare_once(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Check that the model is prepared; a second ``train()`` prepares it again."""
        if self._model is None or all(part is not self._model for part in model.modules()):
            raise RuntimeError(
                f"TiledCallback has not prepared this {type(model).__name__}, which the Trainer has wrapped already:"
                " pass the callback to Trainer(callbacks=[...]) instead of add_callback, and model= instead of"
                " model_init=."
            )
        self.prepare_once(self._model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print the report and restore the model, so that what follows finds it as it was."""
        for prepared in self.prepared:
            self.report = prepared.report()
            if state.is_world_process_zero:
                show(self.report.table(steps=state.global_step))
        self.release()


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
    options = {"put_on_device": True, "use_seedable_sampler": True, "dispatch_batches": False} | kwargs
    shared: DataLoader[Any] = prepare_data_loader(
        loader, PartialState().device, num_processes=groups.count, process_index=groups.index, **options
    )
    shared._is_accelerate_prepared = True  # accelerator.prepare would divide it again
    return shared
