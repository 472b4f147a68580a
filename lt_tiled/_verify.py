"""Compare one training step without and with lt_tiled: the same weights, data, randomness, precision and engine.

NOTE [What is compared]
An engine sets up a copy of the model once. Its steps run with lt_tiled's patches turned off, and turned on, forced to
several tiles. Before each forward pass an :class:`Observation` restores buffers, attributes and generators, so two
passes give twice the gradients of one: that is how gradient accumulation is compared, and how a step is found that does
not repeat. The optimizer of the run changes no weight.
It can put gradients in the place of weights: the full state dict, which every engine can gather, then has them under
the names of the weights. DeepSpeed has a function for that. The same step of a plain copy in higher precision, without
engine and patches, shows the rounding of both.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from lt_tiled._prepare import AppliesPolicies
from lt_tiled._training_step import (
    first_batch,
    length_of,
    nothing,
    raising_on_all,
    stepped_on,
    training_loss,
    with_length,
)
from lt_tiled.checkpointing import BlockPatch
from lt_tiled.cli.numbers import PositiveInt
from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.memory import PeakMemory, provides
from lt_tiled.modules.find import plain_name, unwrapped, walk
from lt_tiled.modules.patch import Patch, get_patch, get_patches, turned_off
from lt_tiled.sequence_parallel.self_check import rounds_products
from lt_tiled.tiling.observe import History, Observation
from lt_tiled.tiling.patched import tiled_patches
from lt_tiled.tiling.places import is_equal
from lt_tiled.tiling.recompute import RandomState, random_state_kept
from lt_tiled.tiling.state import TiledPatch
from lt_tiled.verification import EVALUATION, LOSS, Step, Verification, compare, listed, norm_of, worst

_TILES = 5
"""Tiles where the settings leave their number open: five of a power of two have a shorter last one."""


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
        reference: Compute the step in float64 (float32 for 16-bit weights), too, on each device without sharding.
            Without it, or if the step draws random numbers, errors are relative to the untiled step.
        trainer: Other arguments of the Trainer, such as ``precision`` and ``devices``.

    Raises:
        ValueError: If the step cannot run.
    """
    module = model if isinstance(model, LightningModule) and step is None else _Stepping(model, step or _loss_of)
    device = next((weight.device.type for weight in model.parameters()), "auto")
    return _run(module, _Comparison(module, batch, None, reference), {"accelerator": device} | trainer, strategy)


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
    comparison = _Comparison(model, None, int(seq), reference)
    result = _run(model, comparison, arguments, arguments.pop("strategy", "auto"), datamodule)
    if comparison.trainer.is_global_zero:
        from rich.console import Console  # offline images may lack it

        console = Console()
        if not console.is_terminal:
            console.width = 1000
        console.print(result.table())
        console.print(result.verdict, highlight=False, soft_wrap=True)
    return result


def _run(
    module: LightningModule, comparison: _Comparison, trainer: Mapping[str, Any], strategy: Any, data: Any = None
) -> Verification:
    callbacks = trainer.get("callbacks") or []
    kept = [c for c in (callbacks if isinstance(callbacks, list) else [callbacks]) if isinstance(c, AppliesPolicies)]
    run = Trainer(**{**trainer, **_NO_STEPS, "strategy": strategy, "callbacks": [*kept, comparison]})
    if isinstance(run.strategy, DeepSpeedStrategy):
        assert run.strategy.config is not None
        own = {name: value for name, value in run.strategy.config.items() if name not in ("optimizer", "scheduler")}
        own |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        run.strategy.config = own

    def configure_optimizers() -> torch.optim.Optimizer:
        model: Any = run.model
        # The state dict has the parts of flat weights: those of frozen ones must not be taken for gradients.
        kept = [p for p in model.parameters() if p.requires_grad or isinstance(p, FlatParameter)]
        if not kept:
            raise ValueError("All weights are frozen, so there are no gradients to compare: train at least one weight.")
        _fill_zeros(p for p in kept if p.requires_grad)  # before DeepSpeed copies the weights
        comparison.optimizer = _Gradients(kept)
        return comparison.optimizer

    trained = copy.deepcopy(module)
    trained.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    loader = None if comparison.batch is None else range(1)  # never read: all steps run when the fit starts
    run.fit(trained, loader, datamodule=data)
    if comparison.result is None:
        raise ValueError(
            "A strategy that spawns processes keeps its results: use one that starts scripts, or torchrun."
        )
    return comparison.result


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


class _Stepping(LightningModule):
    """Gives a plain module a ``training_step``."""

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self._step = model, step

    def configure_model(self) -> None:
        """Do nothing: Lightning wants this hook under FSDP2."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(self.model, batch)


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(f"{type(model).__name__} returns no loss for the batch: pass step=lambda model, batch: ...")
    return loss


class _Gradients(torch.optim.Optimizer):
    """Changes no weight, but can put gradients in the place of weights."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.0})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.steps += 1
        return loss

    @torch.no_grad()
    def gathered(self, gather: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what ``gather`` returns while gradients are in the place of weights."""
        weights = stepped_on(self)
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.zero_() if weight.grad is None else weight.copy_(weight.grad)
        try:
            return gather()
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


class _Comparison(Callback):
    """Runs the steps when a Trainer's ``fit`` has set up the engine."""

    optimizer: _Gradients
    before: dict[str, Tensor]
    """The buffers with which each pass begins."""
    state: Observation
    """What else each pass begins with: attributes, containers, modes and generators."""
    trainer: Any
    trained: LightningModule
    """The copy that the engine trains."""
    draws = False
    """Whether a step without dropout draws random numbers."""
    result: Verification | None = None

    def __init__(self, module: LightningModule, batch: Any, seq: int | None, reference: bool) -> None:
        self.module, self.batch, self.seq, self.reference = module, batch, seq, reference

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.trainer, self.trained = trainer, pl_module
        name = type(unwrapped(self.module.model if isinstance(self.module, _Stepping) else self.module)).__name__
        if not pl_module.automatic_optimization:
            raise ValueError(f"{name} optimizes manually: use lt_tiled.verify(model, batch, step=...).")
        patches = [patch for module in pl_module.modules() for patch in get_patches(module, Patch)]
        if not patches:
            raise ValueError(f"lt_tiled changes nothing in {name}: use one of its strategies or callbacks.")
        if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in pl_module.modules()):
            raise ValueError("Sparse gradients cannot be compared: verify with sparse=False, with the same values.")
        _force_tiles(patches)
        _prepare(pl_module)
        with isolate_rng(), random_state_kept(self.device):
            raising_on_all(lambda: self._compare(name), trainer.strategy)

    def _compare(self, name: str) -> None:
        trainer, trained = self.trainer, self.trained
        torch.manual_seed(1)  # as all other ranks, which shuffle the data alike
        self._read_batch()
        self.before, self.state = _buffers(trained), _observed(trained)
        weights = self._full() if self.reference else {}
        with turned_off(trained):
            plain, plain_sum, untiled = self._measure()
        ours, ours_sum, tiled = self._measure()
        kinds = {weight.dtype for weight in trained.parameters()}
        dtype = torch.float64 if kinds & {torch.float32, torch.float64} else torch.float32
        self.draws = trainer.strategy.reduce_boolean_decision(self.draws, all=False)
        truth: dict[str, Tensor] = {}
        if self.reference and not self.draws:  # other precisions draw other random numbers
            truth = self._step_in(dtype, weights)
        self.state.undo()
        base = truth or plain
        same = {k for k, b in self.before.items() if all(is_equal(b, v[k]) for v in (plain, ours))}
        names = [k for k in base if k not in same and not (k == EVALUATION and base[k].isnan())]
        gradients = [k for k in names if k not in (LOSS, EVALUATION) and k not in self.before]
        if not norm_of(base, gradients):
            raise ValueError("The step has no gradients: use a model and a batch with a loss to train on.")
        if trainer.is_global_zero:
            bits = str(trainer.precision).split("-")[0]
            mixed = {"bf16": {torch.bfloat16}, "16": {torch.float16}}.get(bits, set())
            eps = max(torch.finfo(kind).eps for kind in kinds | mixed if kind.is_floating_point)
            if torch.float32 in kinds and (rounds_products() or self._rounds_convolutions()):
                eps = max(eps, 2.0**-10)  # of TF32
            prefix = "model." if isinstance(self.module, _Stepping) else ""
            tiles = [(path.removeprefix(prefix), count) for path, count in _tiles(trained)]
            summed = worst(compare(plain_sum, ours_sum, truth, eps, gradients, gradients, prefix))
            again = worst(compare(plain, plain_sum, {}, eps, gradients, gradients, prefix))
            rows = compare(plain, ours, truth, eps, names, gradients, prefix)
            self.result = Verification(
                f"{name}, {length_of(self.batch)} tokens, {trainer.precision}, {type(trainer.strategy).__name__}",
                f"a step in {str(dtype).removeprefix('torch.')}" if truth else "the untiled step",
                Step(float(plain[LOSS]), norm_of(plain, gradients), *untiled),
                Step(float(ours[LOSS]), norm_of(ours, gradients), *tiled),
                (*rows, replace(summed, path=f"two micro-batches: {summed.path}")),
                max((count for _, count in tiles), default=None),
                listed([path for path, count in tiles if count < 2], [path for path, _ in tiles]),
                self.draws,
                None if again.passed else again,
            )
        self.result = trainer.strategy.broadcast(self.result)

    def _read_batch(self) -> None:
        strategy = self.trainer.strategy
        if self.batch is None:
            place = getattr(strategy, "distributed_sampler_kwargs", None) or {}
            self.batch = first_batch(self.trained, self.trainer.datamodule, place.get("rank", 0))
        if self.seq is not None and length_of(self.batch) > self.seq:
            self.batch = with_length(self.batch, self.seq)
        self.batch = strategy.batch_to_device(self.batch)

    def _measure(self) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[int, int, float]]:
        """Run three steps: one to compare, one for FLOPs and memory, one of two passes, whose mean is compared."""
        from lt_tiled.planner.ledger import Flops, Ledger

        memory, strategy = PeakMemory(self.device), self.trainer.strategy
        values, _ = self._step(passes=1)
        memory.reset()
        base = memory.read()
        counted = Flops() if memory.counts else Ledger(only=self.device.type)
        with counted:
            self._step()
        peak = counted.peak if isinstance(counted, Ledger) else memory.read() - base
        summed, seconds = self._step(passes=2)
        values[EVALUATION] = self._evaluated(strategy.training_step, self.trained, self.batch, self.state)
        return values, summed, (counted.flops, peak, seconds)

    def _step(self, passes: int = 0) -> tuple[dict[str, Tensor], float]:
        """Run a step of the engine. Return loss, buffers, mean gradients of its passes (0: one, unread), and time."""
        strategy, optimizer = self.trainer.strategy, self.trainer.optimizers[0]
        loss, gradients, seconds = torch.tensor(0.0), dict[str, Tensor](), 0.0

        def closure() -> Tensor:
            nonlocal loss, gradients, seconds
            for index in range(passes or 1):
                with random_state_kept(self.device):  # each pass draws what the others draw
                    self.state.undo()
                    batch = copy.deepcopy(self.batch)  # which steps may change
                    before, start = RandomState.now(self.device), self._now()
                    loss = training_loss(strategy.training_step, self.trained, batch)
                    if index == 0:
                        optimizer.zero_grad()
                    if self._on_deepspeed:
                        strategy.deepspeed_engine.set_gradient_accumulation_boundary(index >= passes - 1)
                    strategy.backward(loss, optimizer)
                    seconds = self._now() - start
                    self.draws |= self.state.drew or not before.same_as(RandomState.now(self.device))
            if passes and self._on_deepspeed:
                from deepspeed.utils import safe_get_full_grad

                scale = getattr(strategy.deepspeed_engine.optimizer, "loss_scale", 1.0)
                weights = {plain_name(name): p for name, p in self.trained.named_parameters() if p.requires_grad}
                gradients = {name: safe_get_full_grad(p).cpu() / scale for name, p in weights.items()}
            return loss

        steps = self.optimizer.steps
        for _ in range(40):  # a gradient scaler leaves out steps until its scale fits
            strategy.optimizer_step(optimizer, closure)
            if self.optimizer.steps > steps:
                break
        else:
            raise ValueError(f"precision={self.trainer.precision} finds no finite gradients: try 32-true.")
        if passes and not self._on_deepspeed:
            gradients = _without_others(self.trained, self.optimizer.gathered(self._full))
        optimizer.zero_grad()
        means = {name: gradient / passes for name, gradient in gradients.items()}
        return self._values(self.trained, loss, means) if passes else {}, seconds

    def _values(self, module: nn.Module, loss: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is compared: the loss, averaged over the ranks, the gradients, and the buffers after a step."""
        mean = self.trainer.strategy.reduce(loss.detach().clone()).cpu()
        return {**gradients, **{k: b for k, b in _buffers(module).items() if k in self.before}, LOSS: mean}

    def _evaluated(self, run: Any, module: LightningModule, batch: Any, state: Observation) -> Tensor:
        """Return the loss in evaluation mode, averaged over the ranks: nan if the step has none there."""
        loss = torch.tensor(torch.nan, device=self.device)
        with suppress(Exception), random_state_kept(self.device), torch.no_grad():
            state.undo()
            loss = training_loss(run, module.eval(), copy.deepcopy(batch)).float().reshape(())
        mean: Tensor = self.trainer.strategy.reduce(loss.clone())
        return mean.cpu()

    def _step_in(self, dtype: torch.dtype, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the step of a plain copy in another precision. Loss and gradients are averaged over the ranks."""
        default = torch.get_default_dtype()
        self.state.undo()
        try:
            module, batch = copy.deepcopy((self.module, self.batch))
            batch = apply_to_collection(batch, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
            module.trainer = self.trainer
            module.configure_model()
            own = module.state_dict()  # with the names of compiled submodules
            own |= {name: weights[plain_name(name)] for name, v in own.items() if isinstance(v, Tensor)}
            module.load_state_dict(own)
            _prepare(module.to(self.device, dtype))
            torch.set_default_dtype(dtype)
            with turned_off(module):
                state = _observed(module)
                loss = training_loss(module.training_step, module, copy.deepcopy(batch))
                module.backward(loss)
                values = self._values(module, loss, {})
                values[EVALUATION] = self._evaluated(module.training_step, module, batch, state)
        except Exception as error:
            raise ValueError(f"The step does not run in {dtype} ({error}): pass reference=False.") from error
        finally:
            torch.set_default_dtype(default)
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                if self.trainer.world_size > 1:
                    dist.all_reduce(gradient)
                values[plain_name(name)] = gradient.cpu() / self.trainer.world_size
        return values

    @property
    def _on_deepspeed(self) -> bool:
        return isinstance(self.trainer.strategy, DeepSpeedStrategy)

    def _full(self) -> dict[str, Tensor]:
        """Return the state dict with full weights, on the CPU."""
        model = self.trained if self._on_deepspeed else self.trainer.model
        with _gathered(self.trained.parameters()):
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            return {name: v.detach().cpu().clone() for name, v in state.items() if isinstance(v, Tensor)}

    def _rounds_convolutions(self) -> bool:
        """Whether the model has convolutions on a GPU, which are in TF32 by default."""
        convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in self.trained.modules())
        on_cuda = self.device.type == "cuda"
        return on_cuda and convolves and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device  # type: ignore[no-any-return]

    def _now(self) -> float:
        if provides(self.device, "synchronize"):
            torch.get_device_module(self.device).synchronize()
        return time.perf_counter()


def _gathered(weights: Iterable[Tensor], change: bool = False) -> Any:
    """All-gather weights that ZeRO-3 shards, to read them, or to change them as the first rank does."""
    sharded = [p for p in weights if hasattr(p, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if change else None)


@torch.no_grad()
def _fill_zeros(weights: Iterable[Tensor]) -> None:
    """Replace zeros by small numbers: weights before zeros, as in a new LoRA adapter, have no gradient to compare."""
    for index, weight in enumerate(weights):
        random = torch.Generator().manual_seed(index)  # replicas stay alike
        with _gathered([weight], change=True):  # one by one: all may not fit on a device
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            noise = torch.normal(0.0, 0.01, own.shape, generator=random)
            own.copy_(torch.where(own == 0, noise.to(own), own))


def _observed(module: nn.Module) -> Observation:
    parts = [unwrapped(module), *(part for _, part in walk(module))]  # engines' units have a state of their own
    return Observation("", parts, "", History(), generators=True)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers of a module, on the CPU."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {plain_name(name): buffer.detach().cpu().clone() for name, buffer in buffers}


def _without_others(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out buffers, frozen weights, and all names of a tied weight but the first."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    weights = dict(module.named_parameters(remove_duplicate=False))
    others = {plain_name(name) for name in weights.keys() - trained} | _buffers(module).keys()
    return {name: value for name, value in state.items() if name not in others}


def _tiles(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of tiles of each module that is to be tiled, and of each head."""
    for path, _, patch in tiled_patches(model):
        in_parts = patch.learned.untiled and patch.found.below  # a mixture of experts, which run in tiles
        if not (patch.found.guessed or in_parts):  # a norm that was guessed stays untiled where it cannot be tiled
            yield path, patch.learned.largest[1]
    for path, module in walk(model):
        if (head := get_patch(module, HeadPatch)) is not None:
            yield path, head.learned.largest[1]


def _force_tiles(patches: list[Patch]) -> None:
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


def _prepare(model: nn.Module) -> None:
    """Turn off logging, which needs a training loop, hooks that change gradients, and dropout: tiles draw own masks."""
    hooks = ("log", "log_dict", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    vars(model).update(dict.fromkeys(hooks, nothing))
    if isinstance(model, _Stepping) and not unwrapped(model.model).training:
        model.model.train()  # loops do: from_pretrained returns models in evaluation mode
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
