"""The steps that are compared: those of the engine, each from the same state, and the reference in higher precision."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lt_tiled.memory import PeakMemory, provides
from lt_tiled.modules.find import plain_name
from lt_tiled.modules.patch import turned_off
from lt_tiled.tiling.observe import Observation
from lt_tiled.tiling.recompute import RandomState, random_state_kept
from lt_tiled.training_step import ranks_fail_together, run_step, training_loss
from lt_tiled.verification.gradients import GradientReader, deepspeed_gradients, full_state
from lt_tiled.verification.module import buffers_of, make_comparable, observe, without_untrained
from lt_tiled.verification.rows import EVALUATION, LOSS


@dataclass(frozen=True)
class Measured:
    """What the steps of an engine gave."""

    values: dict[str, Tensor]
    """Gradients and buffers by name, the loss, and the loss in evaluation mode."""
    accumulated: dict[str, Tensor]
    """The values of two passes with the same batch, with the mean of their gradients."""
    flops: int
    peak: int
    seconds: float


class EngineSteps:
    """Runs steps on the engine of a Trainer, all from the state of when it was made.

    Args:
        trainer: The Trainer that has set up the engine.
        module: The module that the engine trains.
        batch: The batch, on its device.
        reader: The optimizer.
    """

    def __init__(self, trainer: Any, module: LightningModule, batch: Any, reader: GradientReader) -> None:
        self.trainer, self.module, self.batch, self.reader = trainer, module, batch, reader
        self.strategy, self.optimizer = trainer.strategy, trainer.optimizers[0]
        self.device: torch.device = self.strategy.root_device
        self.deepspeed = self.strategy.deepspeed_engine if isinstance(self.strategy, DeepSpeedStrategy) else None
        self.state, self.buffers = observe(module), buffers_of(module)
        self.draws = False
        """Whether a step so far drew random numbers."""

    def measure(self) -> Measured:
        """Run three steps: one to compare, one for FLOPs and memory, one of two passes. Evaluate the loss at last."""
        values, _ = self._step()
        flops, peak = self._count()
        accumulated, seconds = self._step(passes=2)
        run = self.strategy.training_step
        values[EVALUATION] = evaluated_loss(run, self.module, self.batch, self.state, self.strategy)
        return Measured(values, accumulated, flops, peak, seconds)

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by name, on the CPU; while the optimizer reads gradients, these."""
        return full_state(self.trainer.model if self.deepspeed is None else self.module)

    def _count(self) -> tuple[int, int]:
        """Run a step and return its FLOPs, and the peak of the bytes that it allocates."""
        from lt_tiled.planner.ledger import Flops, Ledger

        memory = PeakMemory(self.device)
        memory.reset()
        base = memory.read()
        counted = Flops() if memory.counts else Ledger(only=self.device.type)
        with counted:
            self._step(read=False)
        return counted.flops, counted.peak if isinstance(counted, Ledger) else memory.read() - base

    def _step(self, passes: int = 1, read: bool = True) -> tuple[dict[str, Tensor], float]:
        """Run a step of some passes. Return its values, with mean gradients, and the seconds of the last pass."""
        loss, seconds, gradients = torch.tensor(0.0), 0.0, dict[str, Tensor]()

        def closure() -> Tensor:
            nonlocal loss, seconds, gradients
            for index in range(passes):
                loss, seconds = self._pass(first=index == 0, last=index == passes - 1)
            if read and self.deepspeed is not None:
                gradients = deepspeed_gradients(self.deepspeed, self.module)
            return loss

        self._optimizer_step(closure)
        if read and self.deepspeed is None:
            gradients = without_untrained(self.module, self.reader.read(self.weights))
        self.optimizer.zero_grad()
        if not read:
            return {}, seconds
        means = {name: gradient / passes for name, gradient in gradients.items()}
        return means | values_of(self.strategy, self.module, loss, self.buffers), seconds

    def _pass(self, first: bool, last: bool) -> tuple[Tensor, float]:
        """Run a forward and a backward pass from the recorded state, and return the loss and the seconds."""
        with random_state_kept(self.device):  # each pass draws what the others draw
            self.state.undo()
            batch = copy.deepcopy(self.batch)  # which steps may change
            if self.deepspeed is not None:
                self.deepspeed.set_gradient_accumulation_boundary(last)
            before, start = RandomState.now(self.device), self._now()
            loss = run_step(self.strategy, self.module, batch, self.optimizer, zero_grad=first)
            seconds = self._now() - start
            self.draws |= self.state.drew or not before.same_as(RandomState.now(self.device))
        return loss, seconds

    def _optimizer_step(self, closure: Callable[[], Tensor]) -> None:
        """Step until the optimizer does: a gradient scaler leaves out steps until its scale fits."""
        steps = self.reader.steps
        for _ in range(40):
            self.strategy.optimizer_step(self.optimizer, closure)
            if self.reader.steps > steps:
                return
        raise ValueError(f"precision={self.trainer.precision} finds no finite gradients: try 32-true.")

    def _now(self) -> float:
        if provides(self.device, "synchronize"):
            torch.get_device_module(self.device).synchronize()
        return time.perf_counter()


def reference_values(
    module: LightningModule, steps: EngineSteps, dtype: torch.dtype, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Run the step of a plain copy in another precision. Loss and gradients are averaged over the ranks.

    Raises:
        ValueError: If it does not run.
    """
    default, strategy = torch.get_default_dtype(), steps.strategy
    steps.state.undo()
    try:
        plain, batch = copy.deepcopy((module, steps.batch))
        batch = apply_to_collection(batch, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
        plain.trainer = steps.trainer
        plain.configure_model()
        own = plain.state_dict()  # with the names of compiled submodules
        own |= {name: weights[plain_name(name)] for name, value in own.items() if isinstance(value, Tensor)}
        plain.load_state_dict(own)
        make_comparable(plain.to(steps.device, dtype))
        torch.set_default_dtype(dtype)
        with turned_off(plain):
            state = observe(plain)
            loss = training_loss(plain.training_step, plain, copy.deepcopy(batch))
            plain.backward(loss)
            values = values_of(strategy, plain, loss, steps.buffers)
            values[EVALUATION] = evaluated_loss(plain.training_step, plain, batch, state, strategy)
    except Exception as error:
        raise ValueError(f"The step does not run in {dtype} ({error}): pass reference=False.") from error
    finally:
        torch.set_default_dtype(default)
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if steps.trainer.world_size > 1:
                dist.all_reduce(gradient)
            values[plain_name(name)] = gradient.cpu() / steps.trainer.world_size
    return values


def values_of(strategy: Any, module: LightningModule, loss: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss of a step, averaged over the ranks, and the buffers after it, of those that there were."""
    values = {name: buffer for name, buffer in buffers_of(module).items() if name in buffers}
    values[LOSS] = strategy.reduce(loss.detach().clone()).cpu()
    return values


def evaluated_loss(
    run: Callable[..., Any], module: LightningModule, batch: Any, state: Observation, strategy: Any
) -> Tensor:
    """Return the loss in evaluation mode, averaged over the ranks: nan if the step fails there on all ranks.

    Raises:
        ValueError: If the step fails on this rank and not on all.
    """
    state.undo()
    try:
        with random_state_kept(strategy.root_device), torch.no_grad():
            loss = training_loss(run, module.eval(), copy.deepcopy(batch)).float().reshape(())
    except Exception as error:
        if ranks_fail_together(error):
            return torch.tensor(torch.nan)
        where = f"in evaluation mode on rank {strategy.global_rank} and not on all ranks"
        raise ValueError(f"The step fails {where}: {type(error).__name__}: {error}") from error
    mean: Tensor = strategy.reduce(loss.clone())
    return mean.cpu()
