"""``lt_tiled.verify`` and ``lt-tiled verify``: a Trainer whose fit sets up an engine and runs the comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled._types import PositiveInt
from lt_tiled.report import show
from lt_tiled.verification.comparison import Comparison
from lt_tiled.verification.gradients import GradientReader
from lt_tiled.verification.result import Verification
from lt_tiled.verification.steps import ModuleWithStep


def verify(
    model: nn.Module,
    batch: Any,
    *,
    step: Callable[[Any, Any], Tensor] | None = None,
    strategy: Any = "tiled",
    reference: bool = True,
    **trainer: Any,
) -> Verification:
    """Compare a training step of a model without and with lt_tiled, and return what differs by how much.

    The model stays as it is: copies of it are trained. Dropout is off, because tiles draw masks of their own, and zeros
    of trained weights are replaced by small numbers, because they would stop gradients.

    Args:
        model: A LightningModule, or any module.
        batch: A batch. Sequences of a few hundred tokens are enough, because the tiles are made that small.
        step: For loops with Fabric or plain PyTorch: a function that takes the model and the batch and returns the
            loss. By default that of ``training_step``, or of the output of the model.
        strategy: A strategy with its settings, as for a Trainer, which is also that of the same name for Fabric.
        reference: Whether to compute the step in float64 as well (float32 for 16-bit weights), on each device without
            sharding. Without it, or if the step draws random numbers, errors are relative to the untiled step.
        trainer: Other arguments of the Trainer, such as ``precision`` and ``devices``.

    Raises:
        ValueError: If the step cannot run.
    """
    module = model if isinstance(model, LightningModule) and step is None else ModuleWithStep(model, step)
    device = next((weight.device.type for weight in model.parameters()), "auto")
    return _fit(module, Comparison(module, batch, None, reference), {"accelerator": device} | trainer, strategy)


def run_verify(
    trainer: Mapping[str, Any],
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    seq: PositiveInt = 256,
    reference: bool = True,
) -> Verification:
    """Compare a training step of a configuration without and with lt_tiled: loss, gradients, FLOPs, memory and time.

    Args:
        trainer: The arguments of the Trainer, with their objects.
        model: The module.
        datamodule: Its data, of which each rank takes one batch.
        seq: The longest sequence length. Tiles are made small enough that there are several.
        reference: Compute the step in float64 (float32 for 16-bit weights), too, on each device without sharding. Turn
            it off for a model that does not fit; bounds are then estimated.
    """
    for holder in (datamodule, model):
        if getattr(holder, "seq_len", 0) > seq:
            holder.seq_len = int(seq)  # type: ignore[union-attr]
    arguments = dict(trainer)
    comparison = Comparison(model, None, int(seq), reference)
    result = _fit(model, comparison, arguments, arguments.pop("strategy", "auto"), datamodule)
    if comparison.trainer.is_global_zero:
        show(result.table(), result.verdict)
    return result


_OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones", "fast_dev_run")
_NO_STEPS: dict[str, Any] = {
    **dict.fromkeys(_OFF, False),
    **dict.fromkeys(("max_steps", "limit_val_batches", "num_sanity_val_steps"), 0),
    **dict.fromkeys(("gradient_clip_val", "min_steps", "min_epochs", "max_time"), None),
    "max_epochs": -1,
    "accumulate_grad_batches": 1,
    "overfit_batches": 0.0,
}
"""The arguments of a Trainer that sets up an engine and runs no step by itself."""


def _fit(
    module: LightningModule, comparison: Comparison, trainer: Mapping[str, Any], strategy: Any, data: Any = None
) -> Verification:
    """Set up the engine for a copy of the module, let the comparison run its steps, and return the result."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    kept = [callback for callback in callbacks if isinstance(callback, AppliesPolicies)]
    run = Trainer(**{**trainer, **_NO_STEPS, "strategy": strategy, "callbacks": [*kept, comparison]})
    if isinstance(run.strategy, DeepSpeedStrategy):
        assert run.strategy.config is not None
        own = {name: value for name, value in run.strategy.config.items() if name not in ("optimizer", "scheduler")}
        own |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        run.strategy.config = own

    def configure_optimizers() -> GradientReader:
        assert run.model is not None
        comparison.reader = GradientReader(run.model)
        return comparison.reader

    trained = copy.deepcopy(module)
    trained.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    loader = None if comparison.batch is None else range(1)  # never read: all steps run when the fit starts
    run.fit(trained, loader, datamodule=data)
    if comparison.result is None:
        raise ValueError(
            "A strategy that spawns processes keeps its results: use one that starts scripts, or torchrun."
        )
    return comparison.result
