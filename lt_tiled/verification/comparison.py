"""The comparison of a training step without and with lt_tiled, on the engine that a Trainer has set up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lt_tiled.checkpointing import BlockPatch
from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Patch, get_patch, get_patches, turned_off
from lt_tiled.sequence_parallel.self_check import rounds_products
from lt_tiled.tiling.patched import tiled_patches
from lt_tiled.tiling.places import is_equal
from lt_tiled.tiling.recompute import random_state_kept
from lt_tiled.tiling.state import TiledPatch
from lt_tiled.training_step.ranks import raising_on_all
from lt_tiled.training_step.step import first_batch, length_of, with_length
from lt_tiled.verification.gradients import GradientReader
from lt_tiled.verification.result import EVALUATION, LOSS, Differences, Step, Verification, listed, norm_of, worst
from lt_tiled.verification.steps import (
    EngineSteps,
    Measured,
    ModuleWithStep,
    make_comparable,
    name_of,
    reference_values,
)

_TILES = 5
"""Tiles where the settings leave their number open: five of a power of two have a shorter last one."""


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
        prefix = "model." if isinstance(self.module, ModuleWithStep) else ""
        differences = Differences(_eps(self.trainer, trained), gradients, prefix)
        rows = differences.rows(untiled.values, tiled.values, reference, names)
        accumulated = worst(differences.rows(untiled.accumulated, tiled.accumulated, reference, gradients))
        repeated = worst(differences.rows(untiled.values, untiled.accumulated, {}, gradients))
        tiles = [(path.removeprefix(prefix), count) for path, count in tiles_of(trained)]
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


def _is_unchanged(name: str, buffers: dict[str, Tensor], untiled: Measured, tiled: Measured) -> bool:
    """Whether this is a buffer that no step changes."""
    return name in buffers and all(is_equal(buffers[name], step.values[name]) for step in (untiled, tiled))


def _figures(measured: Measured, gradients: list[str]) -> Step:
    norm = norm_of(measured.values, gradients)
    return Step(float(measured.values[LOSS]), norm, measured.flops, measured.peak, measured.seconds)


def force_tiles(patches: list[Patch]) -> None:
    """Let every call, however short, run in several tiles, and offload every block input that may be offloaded."""
    for patch in patches:
        if isinstance(patch, TiledPatch | HeadPatch):
            patch.learned.largest = (0, 0)  # whatever ran before
        if isinstance(patch, TiledPatch) and patch.tiling.num_shards in ("auto", 1):
            patch.tiling = replace(patch.tiling, num_shards=_TILES, tile_tokens=None)
        elif isinstance(patch, HeadPatch):
            patch.owners = {owner: _TILES if count in ("auto", 1) else count for owner, count in patch.owners.items()}
        elif isinstance(patch, BlockPatch) and patch.offload is not None:
            patch.offload.offloader.min_bytes = 0


def tiles_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of tiles of each module that is to be tiled, and of each head."""
    for path, _, patch in tiled_patches(module):
        in_parts = patch.learned.untiled and patch.found.below  # a mixture of experts, which run in tiles
        if not (patch.found.guessed or in_parts):  # a norm that was guessed stays untiled where it cannot be tiled
            yield path, patch.learned.largest[1]
    for path, part in walk(module):
        if (head := get_patch(part, HeadPatch)) is not None:
            yield path, head.learned.largest[1]


def patches_of(module: nn.Module) -> list[Patch]:
    """Return what lt_tiled has set on a module and its submodules."""
    return [patch for part in module.modules() for patch in get_patches(part, Patch)]
