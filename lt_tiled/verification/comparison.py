"""The comparison of a training step without and with lt_tiled, on the engine that a Trainer has set up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lt_tiled.modules.patch import turned_off
from lt_tiled.sequence_parallel.self_check import rounds_products
from lt_tiled.tiling.places import is_equal
from lt_tiled.tiling.recompute import random_state_kept
from lt_tiled.training_step import first_batch, length_of, raising_on_all, with_length
from lt_tiled.verification.gradients import GradientReader
from lt_tiled.verification.module import force_tiles, make_comparable, name_of, patches_of, prefix_of, tiles_of
from lt_tiled.verification.result import Step, Verification
from lt_tiled.verification.rows import EVALUATION, LOSS, Differences, listed, norm_of, worst
from lt_tiled.verification.steps import EngineSteps, Measured, reference_values


class Comparison(Callback):
    """Runs the steps when a Trainer's ``fit`` has set up the engine.

    Args:
        module: The module of which the engine trains a copy.
        batch: A batch; ``None`` for one of the data of the run.
        seq: The longest sequence length.
        reference: Whether to run the step in higher precision as well.
    """

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
        steps.state.undo()
        self.result = strategy.broadcast(self._result(steps, untiled, tiled, reference))

    def _read_batch(self, trained: LightningModule) -> Any:
        strategy, batch = self.trainer.strategy, self.batch
        if batch is None:
            place = getattr(strategy, "distributed_sampler_kwargs", None) or {}
            batch = first_batch(trained, self.trainer.datamodule, place.get("rank", 0))
        if self.seq is not None and length_of(batch) > self.seq:
            batch = with_length(batch, self.seq)
        return strategy.batch_to_device(batch)

    def _result(
        self, steps: EngineSteps, untiled: Measured, tiled: Measured, reference: dict[str, Tensor]
    ) -> Verification:
        base, trained = reference or untiled.values, steps.module
        names = [name for name in base if not _is_unchanged(name, steps.buffers, untiled, tiled)]
        if base[EVALUATION].isnan():
            names.remove(EVALUATION)
        gradients = [name for name in names if name not in (LOSS, EVALUATION) and name not in steps.buffers]
        if not norm_of(base, gradients):
            raise ValueError("The step has no gradients: use a model and a batch with a loss to train on.")
        differences = Differences(self._eps(trained), gradients, prefix_of(self.module))
        rows = differences.rows(untiled.values, tiled.values, reference, names)
        accumulated = worst(differences.rows(untiled.accumulated, tiled.accumulated, reference, gradients))
        repeated = worst(differences.rows(untiled.values, untiled.accumulated, {}, gradients))
        tiles = [(path.removeprefix(differences.prefix), count) for path, count in tiles_of(trained)]
        precision, strategy = self.trainer.precision, type(self.trainer.strategy).__name__
        dtype = str(_reference_dtype(trained)).removeprefix("torch.")
        return Verification(
            title=f"{name_of(self.module)}, {length_of(steps.batch)} tokens, {precision}, {strategy}",
            reference=f"a step in {dtype}" if reference else "the untiled step",
            untiled=_figures(untiled, gradients),
            tiled=_figures(tiled, gradients),
            rows=(*rows, replace(accumulated, path=f"two micro-batches: {accumulated.path}")),
            tiles=max((count for _, count in tiles), default=None),
            not_tiled=listed([path for path, count in tiles if count < 2], [path for path, _ in tiles]),
            draws=steps.draws,
            unrepeated=None if repeated.passed else repeated,
        )

    def _eps(self, trained: LightningModule) -> float:
        """Return the precision of the run."""
        bits, dtypes = str(self.trainer.precision).split("-")[0], _dtypes(trained)
        mixed = {"bf16": {torch.bfloat16}, "16": {torch.float16}}.get(bits, set())
        eps = max(torch.finfo(dtype).eps for dtype in dtypes | mixed if dtype.is_floating_point)
        on_cuda = self.trainer.strategy.root_device.type == "cuda"
        in_tf32 = rounds_products() or (on_cuda and _rounds_convolutions(trained))
        return max(eps, 2.0**-10) if torch.float32 in dtypes and in_tf32 else eps


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


def _rounds_convolutions(module: nn.Module) -> bool:
    """Whether the module has convolutions, and they are in TF32, as is the default on a GPU."""
    convolves = any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in module.modules())
    return convolves and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


def _is_unchanged(name: str, buffers: dict[str, Tensor], untiled: Measured, tiled: Measured) -> bool:
    """Whether this is a buffer that no step changes."""
    if name not in buffers:
        return False
    return all(is_equal(buffers[name], measured.values[name]) for measured in (untiled, tiled))


def _figures(measured: Measured, gradients: list[str]) -> Step:
    norm = norm_of(measured.values, gradients)
    return Step(float(measured.values[LOSS]), norm, measured.flops, measured.peak, measured.seconds)
