"""``lt_tiled.verify`` and ``lt-tiled verify``: compare a step without and with lt_tiled on the engine of a Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled._prepare import AppliesPolicies
from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.modules.find import unwrapped
from lt_tiled.modules.patch import Patch, get_patches, turned_off
from lt_tiled.policies import check_count
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.recompute.mode import random_state_kept, rounds_products
from lt_tiled.report import Report
from lt_tiled.strategies.deepspeed import step_with_own_optimizer
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.training_step.step import first_batch, run_step, shape_of, with_length
from lt_tiled.verification.result import Measured, Verification, compare
from lt_tiled.verification.steps import GradientsAsWeights, ModuleWithStep, full_gradients, make_comparable

_TILES = 5
"""Tiles where the settings leave their number open: five of a power of two have a shorter last one."""
_ENGINE = ("strategy", "accelerator", "devices", "num_nodes", "precision", "plugins", "sync_batchnorm")
"""The arguments of a Trainer that make its engine."""
_OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
_AUTOCAST = {"bf16-mixed": {torch.bfloat16}, "16-mixed": {torch.float16}}
"""The dtypes of mixed precision."""


def verify(
    model: nn.Module,
    batch: Any,
    *,
    step: Callable[[Any, Any], Tensor] | None = None,
    strategy: Any = "tiled",
    **trainer: Any,
) -> Verification:
    """Compare a training step of a model without and with lt_tiled.

    Copies of the model are trained, so the model does not change. Dropout and jitter are off, because tiles
    draw other numbers. Zeros of trained weights are replaced by small numbers, because they would stop gradients.

    Args:
        model: A LightningModule, or any module.
        batch: A batch. Sequences of a few hundred tokens are enough, because tiles are made small as well.
        step: A function that takes the model and the batch and returns the loss, for loops with Fabric or plain
            PyTorch. By default, ``training_step``, or the loss in the output of the model.
        strategy: A strategy for a Trainer, with its settings.
        trainer: Other arguments of the Trainer, such as ``precision`` and ``devices``.

    Raises:
        ValueError: If the step cannot run.
    """
    module: Any = model
    if step is not None or not isinstance(model, LightningModule):
        module = ModuleWithStep(model, step)
    device = next((weight.device.type for weight in model.parameters()), "auto")
    arguments = {"accelerator": device} | trainer | {"strategy": strategy}
    return Comparison(type(unwrapped(model)).__name__, module, batch, 0).run(arguments)


def run_verify(
    trainer: Mapping[str, Any],
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    seq: int = 256,
) -> Verification:
    """Compare a training step of a configuration without and with lt_tiled: the loss and all gradients.

    Args:
        trainer: The arguments of the Trainer, with their objects.
        model: The module.
        datamodule: Its data, of which each rank takes one batch.
        seq: The longest sequence length. Tiles are made small enough that there are several.
    """
    check_count("seq", seq)
    result = Comparison(type(model).__name__, model, None, seq).run(trainer, datamodule)
    rank_zero_only(print)(result)
    return result


@dataclass(eq=False)
class Comparison(Callback):
    """Measures a step of each copy of a module on the engine that ``fit`` set up: see NOTE [What is compared]."""

    name: str
    module: LightningModule
    batch: Any  # or None: that of the data, cut to ``seq`` tokens
    seq: int
    steps: list[Measured] = field(default_factory=list)  # untiled, the same from rounded weights, and tiled
    trainer: Any = None
    optimizer: Any = None
    result: Verification | None = None

    def run(self, trainer: Mapping[str, Any], data: LightningDataModule | None = None) -> Verification:
        """Fit copies of the module on the engine of a Trainer, and return what differs."""
        # 1. The engine and the policies are the user's, and nothing else.
        arguments: dict[str, Any] = dict.fromkeys(_OFF, False)
        arguments |= {name: trainer[name] for name in _ENGINE if name in trainer}
        callbacks = tree_leaves(trainer.get("callbacks"))  # one, a list, or none
        policies: list[Any] = [callback for callback in callbacks if isinstance(callback, AppliesPolicies)]
        self.trainer = Trainer(**arguments, max_steps=0, limit_val_batches=0, callbacks=[*policies, self])
        step_with_own_optimizer(self.trainer.strategy)

        def configure_optimizers() -> Any:
            eps = self._precision() if len(self.steps) == 1 else 0.0
            self.optimizer = GradientsAsWeights(self.trainer.model, eps)
            return self.optimizer

        # 2. All fits start from the same random states, which are those of all ranks, because these shuffle alike.
        loader = None if self.batch is None else range(1)  # never read: all steps run when the fit starts
        for _ in range(3):
            with isolate_rng(), random_state_kept(self.trainer.strategy.root_device):
                torch.manual_seed(1)
                trained = copy.deepcopy(self.module)
                trained.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
                self.trainer.fit(trained, loader, datamodule=data)
        if self.result is None:
            raise ValueError("A strategy that spawns processes keeps its results: use one that starts scripts.")
        return self.result

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Run the step of this copy, and compare all steps after the last one."""
        patches = list[Patch]()
        for part in pl_module.modules():
            patches += get_patches(part, Patch)
        if not patches:
            raise ValueError(f"lt_tiled changes nothing in {self.name}: use one of its strategies or callbacks.")
        make_comparable(pl_module)
        # 1. This rank's batch, on its device.
        if self.batch is None:
            place = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
            self.batch = first_batch(pl_module, trainer.datamodule, place.get("rank", 0))
            if shape_of(self.batch)[1] > self.seq:
                self.batch = with_length(self.batch, self.seq)
        self.batch = trainer.strategy.batch_to_device(self.batch)
        # 2. The steps of the untiled copies,
        if len(self.steps) < 2:
            with turned_off(pl_module):
                self.steps.append(self._run_step(pl_module))
            return
        # and of the tiled one.
        force_tiles(patches)
        self.steps.append(self._run_step(pl_module))
        # 3. The result of the first rank is that of all ranks.
        untiled, rounded, tiled = self.steps
        report = Report.of(pl_module)
        precision = str(trainer.precision)
        result = Verification(
            title=f"{self.name}, {shape_of(self.batch)[1]} tokens, {precision}, {type(trainer.strategy).__name__}",
            losses=(untiled.loss, tiled.loss),
            norms=(untiled.norm, tiled.norm),
            rows=compare(untiled, rounded, tiled, self._precision()),
            tiles={row.path: row.tiles for row in (*report.tiled, *report.losses)},
        )
        self.result = trainer.strategy.broadcast(result)

    def _run_step(self, trained: LightningModule) -> Measured:
        strategy = self.trainer.strategy
        optimizer = self.trainer.optimizers[0]
        losses = list[Tensor]()

        def step() -> Tensor:
            losses.append(run_step(strategy, trained, copy.deepcopy(self.batch), optimizer))  # it may change its batch
            return losses[-1]

        # A gradient scaler leaves out steps until its scale fits.
        while not self.optimizer.stepped:
            if len(losses) == 40:
                raise ValueError(f"precision={self.trainer.precision} finds no finite gradients: try 32-true.")
            strategy.optimizer_step(optimizer, step)
        loss = strategy.reduce(losses[-1].detach().clone())  # the mean over the ranks
        return Measured(float(loss), full_gradients(self.trainer.model, trained))

    def _precision(self) -> float:
        """Return the least precision of weights, autocast and products."""
        dtypes = {weight.dtype for weight in self.trainer.model.parameters() if weight.dtype.is_floating_point}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes | _AUTOCAST.get(str(self.trainer.precision), set()))
        return max(eps, 2.0**-10) if torch.float32 in dtypes and rounds_products() else eps


def force_tiles(patches: list[Patch]) -> None:
    """Let every call, however short, run in several tiles, and offload every block input that may be offloaded."""
    for patch in patches:
        if isinstance(patch, TiledPatch) and patch.tiling.num_shards in ("auto", 1):
            patch.tiling = replace(patch.tiling, num_shards=_TILES, tile_tokens=None)
        elif isinstance(patch, HeadPatch) and patch.num_shards in ("auto", 1):
            patch.num_shards = _TILES
        elif isinstance(patch, BlockPatch) and patch.offloader is not None:
            patch.offloader.min_bytes = 0
