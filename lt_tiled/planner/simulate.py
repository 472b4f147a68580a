"""Simulate one training step on fake tensors, with the real model, optimizer and policies, and record its memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled._log import quiet
from lt_tiled._prepare import AppliesPolicies, Prepared
from lt_tiled.errors import SimulationError
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.planner.engines import Engine, Zero, mesh_of, share_weights
from lt_tiled.planner.fake import FakeLedger, fake_group, fake_offloader, fake_weights, without_memory
from lt_tiled.planner.ledger import Allocation, Ledger, Work
from lt_tiled.policies import ActivationCheckpointing, LossShards, SequenceParallel, Tiling
from lt_tiled.tiling.call import EngineNeeds
from lt_tiled.tiling.cut import tiles_to_run
from lt_tiled.training_step.step import stepped_on, training_loss

STATE = ("weights", "gradients", "optimizer", "gathered", "communication")
"""Parts of any sequence length, apart from what ranks that share a sequence exchange."""
PARTS = (*STATE, "block inputs", "attention", "MLP", "loss", "rest")
"""What memory is used for, in display order."""


@dataclass(frozen=True)
class Settings:
    """The settings of a step: policies as in a strategy, the engine and its ranks, and what the Trainer sets.

    Attributes:
        dtype: The dtype of the weights.
        autocast: The dtype of mixed precision.
        accumulate: Batches per optimizer step.
        gpu: Whether the device is a GPU, where the optimizer updates all weights at once.
    """

    tiling: Tiling | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    loss: LossShards | None = None
    sequence_parallel: SequenceParallel | None = None
    engine: Engine = field(default_factory=Engine)
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    accumulate: int = 1
    gpu: bool = False

    @property
    def sharing(self) -> int:
        """The number of ranks that share a sequence."""
        return self.sequence_parallel.size if self.sequence_parallel else 1


@dataclass(frozen=True)
class Simulation:
    """The memory and the work of a step of one rank."""

    peak: int
    """Bytes."""
    peak_at: int
    """The moment of the peak."""
    phases: dict[str, int]
    """The moment at which each phase began."""
    end: int
    allocations: tuple[Allocation, ...]
    """The allocations that were alive in the step."""
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    """With the recompute."""
    offloaded: OffloadStats | None = None
    weights: int = 0
    """The number of weights of the model, on all ranks together."""
    trained: int = 0
    """The number of those that get gradients."""

    @property
    def flops(self) -> int:
        """The FLOPs of the forward pass, the backward pass and the recompute."""
        return self.forward.flops + self.backward.flops

    def parts_at(self, moment: int) -> dict[str, int]:
        """Return the live bytes of each part at a moment, without empty parts."""
        sums = dict.fromkeys(PARTS, 0)
        for a in self.allocations:
            if a.born <= moment and (a.died is None or a.died > moment):
                sums[a.part] += a.nbytes
        return {part: nbytes for part, nbytes in sums.items() if nbytes}

    def over_time(self) -> dict[str, list[int]]:
        """Return the live bytes of each part at every moment from the forward pass on."""
        start = self.phases["forward"]
        changes = {part: [0] * (self.end - start + 2) for part in PARTS}
        for a in self.allocations:
            changes[a.part][max(a.born, start) - start] += a.nbytes
            if a.died is not None and a.died <= self.end:
                changes[a.part][a.died - start] -= a.nbytes
        return {part: list(accumulate(row))[:-1] for part, row in changes.items() if any(row)}


def simulate(module: LightningModule, batch: Any, settings: Settings) -> Simulation:
    """Simulate a step after the first, when optimizer state and the last step's gradients exist.

    Args:
        module: A module on the meta device, with a Trainer.
        batch: A batch on the meta device.
        settings: The settings of the step.
    """
    trainer, module = module.trainer, copy.deepcopy(module)  # it gets fake weights, and FSDP's hooks
    module.trainer = trainer
    trainer.strategy.connect(module)
    engine, phases = settings.engine, dict[str, int]()
    with quiet(), mesh_of(engine) as mesh, without_memory(module) as ledger, ExitStack() as stack:
        # What exists before the step.
        fake_weights(module, torch.float32 if engine.mixed else None)
        ledger.name([*module.parameters(), *module.buffers()], "weights")
        weights = sum(p.numel() for p in module.parameters())
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        share_weights(engine, module, ledger, mesh)
        prepared = stack.enter_context(_prepare(module, settings, ledger))
        optimizer = _optimizer_of(module, settings.gpu)
        zero = Zero(engine, module, optimizer, ledger)
        if not engine.offload_optimizer:
            _run_first_step(optimizer, ledger)
        zero.stepped()
        stack.enter_context(first_two_tiles(ledger))

        def begin(phase: str) -> None:
            phases[phase] = ledger.clock + 1
            ledger.begin(phase)
            zero.begin(phase)

        ledger.restart_peak()
        start, ledger.work = ledger.clock, Work()
        begin("forward")
        fake = apply_to_collection(batch, Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"))
        with torch.autocast("cpu", settings.autocast, enabled=settings.autocast is not None):
            loss = training_loss(module.training_step, module, fake)
        forward, ledger.work = ledger.work, Work()
        if settings.accumulate == 1:
            optimizer.zero_grad()  # at the same place as Lightning
        begin("backward")
        loss.backward()
        del loss
        _name_gradients(optimizer, ledger)
        backward = ledger.work
        begin("optimizer")
        if not engine.offload_optimizer:
            optimizer.step()
        zero.stepped()
        moved = prepared.report().offloaded
        moments = (ledger.peak, ledger.peak_at, phases, ledger.clock)
        alive = tuple([a for a in ledger.allocations if a.died is None or a.died > start])
        return Simulation(*moments, alive, forward, backward, moved, weights, trained)


def _optimizer_of(module: LightningModule, gpu: bool) -> torch.optim.Optimizer:
    optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    if len(optimizers) != 1:
        raise SimulationError(f"{type(module).__name__} has {len(optimizers)} optimizers: a plan needs one.")
    for group in optimizers[0].param_groups if gpu else ():
        if group.get("foreach", True) is None:  # then a GPU updates all weights at once
            group["foreach"] = True
    return optimizers[0]


def _prepare(model: nn.Module, settings: Settings, ledger: Ledger) -> Prepared:
    """Apply the policies, without the self-checks, which need values."""
    tiling, shared, stage = settings.tiling, settings.sequence_parallel, settings.engine.stage
    policies = AppliesPolicies()
    policies.set_policies(
        tiling and replace(tiling, self_check=False, compile=False),
        settings.activation_checkpointing,
        sequence_parallel=shared and replace(shared, self_check=False),
    )
    policies.loss = settings.loss
    if settings.sharing > 1:
        policies.sequence_group = fake_group(settings.sharing)
    build = partial(fake_offloader, partial(ledger.name, part="block inputs"))
    return Prepared(model, policies, EngineNeeds(zeros_for_unused=stage > 0), build)


@contextmanager
def first_two_tiles(ledger: Ledger) -> Iterator[None]:
    """Run only two tiles of each size, and count the FLOPs of all.

    The first tile creates the gradient sums; later ones of its size need the memory and FLOPs of the second.
    """

    def run(rows: Iterable[Any]) -> Iterator[Any]:
        works = dict[str, list[Work]]()
        for row in rows:
            alike = works.setdefault(str([_length(leaf) for leaf in tree_leaves(row)]), [])
            if len(alike) == 2:
                ledger.work += alike[1]
                continue
            before, ledger.work = ledger.work, Work()
            yield row
            alike.append(ledger.work)
            ledger.work += before

    token = tiles_to_run.set(run)
    try:
        yield
    finally:
        tiles_to_run.reset(token)


def _length(leaf: Any) -> Any:
    """Return the size of what a tile is given: a tensor, or the slice of one."""
    if isinstance(leaf, slice):
        return leaf.stop - leaf.start
    return leaf.shape if isinstance(leaf, Tensor) else None


def _run_first_step(optimizer: torch.optim.Optimizer, ledger: FakeLedger) -> None:
    """Create the gradients and the optimizer state that a first step leaves."""
    ledger.begin("optimizer")
    for weight in stepped_on(optimizer):
        if weight.requires_grad:
            weight.backward(torch.empty_like(weight))
    optimizer.step()
    _name_gradients(optimizer, ledger)
    ledger.name([*optimizer.state.values()], "optimizer")


def _name_gradients(optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
    ledger.name([weight.grad for weight in stepped_on(optimizer)], "gradients")
