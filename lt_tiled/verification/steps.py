"""The steps that are compared: those of the engine, each from the same state, and the reference in higher precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lt_tiled.memory import PeakMemory
from lt_tiled.modules.find import is_flat, plain_name, unwrapped, walk
from lt_tiled.modules.patch import turned_off
from lt_tiled.namespaces import is_a
from lt_tiled.recompute.buffers import ModuleState
from lt_tiled.recompute.mode import RandomState, random_state_kept
from lt_tiled.strategies.deepspeed import full_gradients, gathered, keeps_gradients
from lt_tiled.training_step.ranks import ranks_fail_together
from lt_tiled.training_step.step import nothing, run_step, silence, stepped_on, training_loss
from lt_tiled.verification.result import EVALUATION, LOSS, Step, norm_of


class ModuleWithStep(LightningModule):
    """Gives a plain module a ``training_step``."""

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self._step = step or _loss_of

    def configure_model(self) -> None:
        """Do nothing: Lightning wants this hook under FSDP2."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(self.model, batch)


def _loss_of(model: Any, batch: Any) -> Tensor:
    if is_a(model, "LightningModule"):  # of pytorch_lightning
        return training_loss(model.training_step, model, batch)
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(f"{type(model).__name__} returns no loss for the batch: pass step=lambda model, batch: ...")
    return loss


def name_of(module: LightningModule) -> str:
    """Return the name of the class that the user wrote."""
    return type(unwrapped(module.model if isinstance(module, ModuleWithStep) else module)).__name__


def make_comparable(module: LightningModule) -> None:
    """Turn off logging, hooks that change gradients, and dropout: tiles draw masks of their own."""
    silence(module)
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    vars(module).update(dict.fromkeys(hooks, nothing))
    if isinstance(module, ModuleWithStep) and not unwrapped(module.model).training:
        module.model.train()  # loops do: from_pretrained returns models in evaluation mode
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(part).__name__)):
                setattr(part, name, 0.0)


@dataclass(frozen=True)
class Measured:
    """What a step of an engine gave."""

    values: dict[str, Tensor]
    figures: Step


class EngineSteps:
    """Runs steps on the engine that a Trainer has set up, all from the state of when this object was made."""

    def __init__(self, trainer: Any, module: LightningModule, batch: Any, reader: GradientReader) -> None:
        self.trainer, self.module, self.batch, self.reader = trainer, module, batch, reader
        self.strategy, self.optimizer = trainer.strategy, trainer.optimizers[0]
        self.device: torch.device = self.strategy.root_device
        self.engine_has_gradients = keeps_gradients(self.strategy)
        self.state, self.buffers = state_of(module), buffers_of(module)
        self.draws = False
        """Whether a step so far drew random numbers."""

    def measure(self) -> Measured:
        """Run a step to compare, and it again for FLOPs and memory. Evaluate the loss at last."""
        values = self._step()
        flops, peak = self._count()
        norm = norm_of(values, [name for name in values if name not in self.buffers and name != LOSS])
        figures = Step(float(values[LOSS]), norm, flops, peak)
        values[EVALUATION] = self.evaluate(self.strategy.training_step, self.module, self.batch, self.state)
        return Measured(values, figures)

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by name, on the CPU; while the optimizer reads gradients, these."""
        return full_state(self.module if self.engine_has_gradients else self.trainer.model)

    def _count(self) -> tuple[int, int]:
        """Run the step and return its FLOPs, and the peak of the bytes that it allocates."""
        from lt_tiled.planner.ledger import Ledger

        memory = PeakMemory(self.device)
        memory.reset()
        base = memory.read()
        with Ledger(only=self.device.type) as counted:
            self._optimizer_step(self._run)
        self.optimizer.zero_grad()
        return counted.flops, memory.read() - base if memory.counts else counted.peak

    def _step(self) -> dict[str, Tensor]:
        """Run the step and return its loss, its full gradients, and the buffers after it."""
        loss, gradients = torch.tensor(0.0), dict[str, Tensor]()

        def closure() -> Tensor:
            nonlocal loss, gradients
            loss = self._run()
            if self.engine_has_gradients:
                gradients = full_gradients(self.strategy, self.module)
            return loss

        self._optimizer_step(closure)
        if not self.engine_has_gradients:
            gradients = without_untrained(self.module, self.reader.read(self.weights))
        self.optimizer.zero_grad()
        return self.values(self.module, loss, gradients)

    def _run(self) -> Tensor:
        """Run the forward and the backward pass from the recorded state, and return the loss."""
        with isolate_rng(), random_state_kept(self.device):  # each step draws what the others draw
            self.state.put_back()
            before = RandomState.now(self.device)
            batch = copy.deepcopy(self.batch)  # which steps may change
            loss = run_step(self.strategy, self.module, batch, self.optimizer)
            self.draws |= not before.same_as(RandomState.now(self.device))
        return loss

    def _optimizer_step(self, closure: Callable[[], Tensor]) -> None:
        """Step until the optimizer does: a gradient scaler leaves out steps until its scale fits."""
        steps = self.reader.steps
        for _ in range(40):
            self.strategy.optimizer_step(self.optimizer, closure)
            if self.reader.steps > steps:
                return
        raise ValueError(f"precision={self.trainer.precision} finds no finite gradients: try 32-true.")

    def values(self, module: LightningModule, loss: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is compared: gradients, the loss averaged over the ranks, and the buffers after a step."""
        buffers = {name: buffer for name, buffer in buffers_of(module).items() if name in self.buffers}
        return {**gradients, **buffers, LOSS: self.strategy.reduce(loss.detach().clone()).cpu()}

    def evaluate(self, run: Callable[..., Any], module: LightningModule, batch: Any, state: ModuleState) -> Tensor:
        """Return the loss in evaluation mode, averaged over the ranks: nan if the step fails there on all ranks."""
        state.put_back()
        try:
            with random_state_kept(self.device), torch.no_grad():
                loss = training_loss(run, module.eval(), copy.deepcopy(batch)).float().reshape(())
        except Exception as error:
            if ranks_fail_together():
                return torch.tensor(torch.nan)
            where = f"in evaluation mode on rank {self.strategy.global_rank} and not on all ranks"
            raise ValueError(f"The step fails {where}: {type(error).__name__}: {error}") from error
        mean: Tensor = self.strategy.reduce(loss.clone())
        return mean.cpu()


def reference_values(
    module: LightningModule, steps: EngineSteps, dtype: torch.dtype, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Run the step of a plain copy in another precision, and return its values, averaged over the ranks."""
    default, ranks = torch.get_default_dtype(), steps.trainer.world_size
    steps.state.put_back()
    try:
        plain, batch = copy.deepcopy((module, steps.batch))
        batch = apply_to_collection(batch, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
        plain.trainer = steps.trainer
        plain.configure_model()
        full = plain.state_dict()  # with the names of compiled submodules
        full |= {name: weights[plain_name(name)] for name, value in full.items() if isinstance(value, Tensor)}
        plain.load_state_dict(full)
        make_comparable(plain.to(steps.device, dtype))
        torch.set_default_dtype(dtype)
        with turned_off(plain):
            state = state_of(plain)
            loss = training_loss(plain.training_step, plain, copy.deepcopy(batch))
            plain.backward(loss)
            values = steps.values(plain, loss, {})
            values[EVALUATION] = steps.evaluate(plain.training_step, plain, batch, state)
    except Exception as error:
        raise ValueError(f"The step does not run in {dtype} ({error}): pass reference=False.") from error
    finally:
        torch.set_default_dtype(default)
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if ranks > 1:
                dist.all_reduce(gradient)
            values[plain_name(name)] = gradient.cpu() / ranks
    return values


def state_of(module: nn.Module) -> ModuleState:
    """Return what each step of a module begins with."""
    parts = [part for _, part in walk(module)]  # engines' units have a state of their own
    return ModuleState([unwrapped(module), *parts])


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers of a module, on the CPU."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {plain_name(name): buffer.detach().cpu().clone() for name, buffer in buffers}


class GradientReader(torch.optim.Optimizer):
    """Changes no weight but zeros of trained ones, and can put gradients in the place of weights."""

    def __init__(self, model: nn.Module) -> None:
        # The state dict has the parts of flat weights: those of frozen ones must not be taken for gradients.
        weights = [weight for weight in model.parameters() if weight.requires_grad or is_flat(weight)]
        if not weights:
            raise ValueError("All weights are frozen, so there are no gradients to compare: train at least one weight.")
        _fill_zeros(weight for weight in weights if weight.requires_grad)  # before an engine copies the weights
        super().__init__(weights, {"lr": 0.0})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.steps += 1
        return loss

    @torch.no_grad()
    def read(self, read_weights: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what ``read_weights`` returns while gradients are in the place of weights."""
        weights = stepped_on(self)
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.zero_() if weight.grad is None else weight.copy_(weight.grad)
        try:
            return read_weights()
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with full weights, on the CPU."""
    with gathered(model.parameters()):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def without_untrained(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out buffers, frozen weights, and all names of a tied weight but the first."""
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    untrained = dict(module.named_parameters(remove_duplicate=False)).keys() - trained
    untrained |= dict(module.named_buffers(remove_duplicate=False)).keys()
    names = {plain_name(name) for name in untrained}
    return {name: value for name, value in state.items() if name not in names}


@torch.no_grad()
def _fill_zeros(weights: Iterable[Tensor]) -> None:
    """Replace zeros by small numbers: weights before zeros, as in a new LoRA adapter, have no gradient to compare."""
    for index, weight in enumerate(weights):
        random = torch.Generator().manual_seed(index)  # replicas stay alike
        with gathered([weight], change=True):  # one by one: all may not fit on a device
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            noise = torch.normal(0.0, 0.01, own.shape, generator=random)
            own.copy_(torch.where(own == 0, noise.to(own), own))
