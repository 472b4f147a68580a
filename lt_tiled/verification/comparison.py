"""``lt_tiled.verify`` and ``lt-tiled verify``: compare a step without and with lt_tiled on the engine of a Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Patch, get_patch, get_patches, turned_off
from lt_tiled.policies import check_count
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.recompute.mode import random_state_kept
from lt_tiled.report import show
from lt_tiled.sequence_parallel.self_check import rounds_products
from lt_tiled.strategies.deepspeed import keeps_gradients, step_with_own_optimizer
from lt_tiled.tiling.call import LargestCall
from lt_tiled.tiling.patch import TiledPatch, tiled_patches
from lt_tiled.training_step.ranks import raising_on_all
from lt_tiled.training_step.step import first_batch, shape_of, with_length
from lt_tiled.verification.result import EVALUATION, LOSS, Verification, compare, listed, norm_of
from lt_tiled.verification.steps import (
    EngineSteps,
    GradientReader,
    Measured,
    ModuleWithStep,
    make_comparable,
    name_of,
    reference_values,
)

_TILES = 5
"""Tiles where the settings leave their number open: five of a power of two have a shorter last one."""
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
    seq: int = 256,
    reference: bool = True,
) -> Verification:
    """Compare a training step of a configuration without and with lt_tiled: loss, gradients, FLOPs and memory.

    Args:
        trainer: The arguments of the Trainer, with their objects.
        model: The module.
        datamodule: Its data, of which each rank takes one batch.
        seq: The longest sequence length. Tiles are made small enough that there are several.
        reference: Whether to compute the step in float64 as well (float32 for 16-bit weights), on each device without
            sharding. Turn it off for a model that does not fit; bounds are then estimated.
    """
    check_count("seq", seq)
    for holder in (datamodule, model):
        if getattr(holder, "seq_len", 0) > seq:
            holder.seq_len = seq  # type: ignore[union-attr]
    arguments = dict(trainer)
    comparison = Comparison(model, None, seq, reference)
    result = _fit(model, comparison, arguments, arguments.pop("strategy", "auto"), datamodule)
    if comparison.trainer.is_global_zero:
        show(result.table(), result.verdict)
    return result


def _fit(
    module: LightningModule, comparison: Comparison, trainer: Mapping[str, Any], strategy: Any, data: Any = None
) -> Verification:
    """Set up the engine for a copy of the module, let the comparison run its steps, and return the result."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    kept = [callback for callback in callbacks if isinstance(callback, AppliesPolicies)]
    run = Trainer(**{**trainer, **_NO_STEPS, "strategy": strategy, "callbacks": [*kept, comparison]})
    if keeps_gradients(run.strategy):
        step_with_own_optimizer(run.strategy)

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


class Comparison(Callback):
    """Runs the steps when a Trainer's ``fit`` has set up the engine for a copy of the module."""

    trainer: Any
    reader: GradientReader
    """The optimizer of the run."""
    result: Verification | None = None

    def __init__(self, module: LightningModule, batch: Any, seq: int | None, reference: bool) -> None:
        self.module, self.batch, self.seq, self.reference = module, batch, seq, reference

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer
        _check_comparable(pl_module)
        force_tiles(patches_of(pl_module))
        make_comparable(pl_module)
        with isolate_rng(), random_state_kept(trainer.strategy.root_device):
            raising_on_all(lambda: self._compare(pl_module), trainer.strategy)

    def _compare(self, trained: LightningModule) -> None:
        """Run the steps without lt_tiled, with it, and in higher precision; compare them, and tell all ranks."""
        strategy = self.trainer.strategy
        torch.manual_seed(1)  # as all other ranks, which shuffle the data alike
        steps = EngineSteps(self.trainer, trained, self._read_batch(trained), self.reader)
        weights = steps.weights() if self.reference else {}
        with turned_off(trained):
            untiled = steps.measure()
        tiled = steps.measure()
        steps.draws = strategy.reduce_boolean_decision(steps.draws, all=False)
        reference: dict[str, Tensor] = {}
        if self.reference and not steps.draws:  # other precisions draw other random numbers
            reference = reference_values(self.module, steps, _reference_dtype(trained), weights)
        steps.state.put_back()
        self.result = strategy.broadcast(self._result(steps, untiled, tiled, reference))

    def _read_batch(self, trained: LightningModule) -> Any:
        strategy, batch = self.trainer.strategy, self.batch
        if batch is None:
            place = getattr(strategy, "distributed_sampler_kwargs", None) or {}
            batch = first_batch(trained, self.trainer.datamodule, place.get("rank", 0))
        if self.seq is not None and shape_of(batch)[1] > self.seq:
            batch = with_length(batch, self.seq)
        return strategy.batch_to_device(batch)

    def _result(
        self, steps: EngineSteps, untiled: Measured, tiled: Measured, reference: dict[str, Tensor]
    ) -> Verification:
        base, trained = reference or untiled.values, steps.module
        names = list(base)
        for name, buffer in steps.buffers.items():
            if _is_equal(buffer, untiled.values[name]) and _is_equal(buffer, tiled.values[name]):
                names.remove(name)  # no step changes it
        if base[EVALUATION].isnan():
            names.remove(EVALUATION)
        gradients = [name for name in names if name not in (LOSS, EVALUATION) and name not in steps.buffers]
        if not norm_of(base, gradients):
            raise ValueError("The step has no gradients: use a model and a batch with a loss to train on.")
        prefix = "model." if isinstance(self.module, ModuleWithStep) else ""
        eps = _eps(self.trainer, trained)
        rows = compare(untiled.values, tiled.values, reference, names, gradients, eps)
        tiles = [(path.removeprefix(prefix), count) for path, count in tiles_of(trained)]
        precision, strategy = self.trainer.precision, type(self.trainer.strategy).__name__
        dtype = str(_reference_dtype(trained)).removeprefix("torch.")
        return Verification(
            title=f"{name_of(self.module)}, {shape_of(steps.batch)[1]} tokens, {precision}, {strategy}",
            reference=f"a step in {dtype}" if reference else "the untiled step",
            untiled=untiled.figures,
            tiled=tiled.figures,
            rows=tuple(replace(row, path=row.path.removeprefix(prefix)) for row in rows),
            tiles=max((count for _, count in tiles), default=None),
            not_tiled=listed([path for path, count in tiles if count < 2], [path for path, _ in tiles]),
            draws=steps.draws,
        )


def _check_comparable(module: LightningModule) -> None:
    name = name_of(module)
    if not module.automatic_optimization:
        raise ValueError(f"{name} optimizes manually: use lt_tiled.verify(model, batch, step=...).")
    if not patches_of(module):
        raise ValueError(f"lt_tiled changes nothing in {name}: use one of its strategies or callbacks.")
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in module.modules()):
        raise ValueError("Sparse gradients cannot be compared: verify with sparse=False, with the same values.")


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    return {weight.dtype for weight in module.parameters()}


def _reference_dtype(module: nn.Module) -> torch.dtype:
    return torch.float64 if _dtypes(module) & {torch.float32, torch.float64} else torch.float32


def _eps(trainer: Any, module: nn.Module) -> float:
    """Return the precision of the run. Convolutions are in TF32 by default on a GPU."""
    bits, dtypes = str(trainer.precision).split("-")[0], _dtypes(module)
    mixed = {"bf16": {torch.bfloat16}, "16": {torch.float16}}.get(bits, set())
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | mixed if dtype.is_floating_point)
    convolves = any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in module.modules())
    convolves &= trainer.strategy.root_device.type == "cuda"
    in_tf32 = rounds_products() or (convolves and torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]
    return max(eps, 2.0**-10) if torch.float32 in dtypes and in_tf32 else eps


def force_tiles(patches: list[Patch]) -> None:
    """Let every call, however short, run in several tiles, and offload every block input that may be offloaded."""
    for patch in patches:
        if isinstance(patch, TiledPatch | HeadPatch):
            patch.largest = LargestCall()  # whatever ran before
        if isinstance(patch, TiledPatch) and patch.tiling.num_shards in ("auto", 1):
            patch.tiling = replace(patch.tiling, num_shards=_TILES, tile_tokens=None)
        elif isinstance(patch, HeadPatch) and patch.num_shards in ("auto", 1):
            patch.num_shards = _TILES
        elif isinstance(patch, BlockPatch) and patch.offload is not None:
            patch.offload.offloader.min_bytes = 0


def tiles_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of tiles of each module that is to be tiled, and of each head."""
    for path, _, patch in tiled_patches(module):
        in_parts = patch.untiled and patch.spec.below  # a mixture of experts, which run in tiles
        if not (patch.spec.is_lone_norm or in_parts):  # a norm that was guessed stays untiled where it cannot be tiled
            yield path, patch.largest.tiles
    for path, part in walk(module):
        if (head := get_patch(part, HeadPatch)) is not None:
            yield path, head.largest.tiles


def patches_of(module: nn.Module) -> list[Patch]:
    """Return what lt_tiled has set on a module and its submodules."""
    return [patch for part in module.modules() for patch in get_patches(part, Patch)]


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers of one module are equal, and nan equal to nan."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
