"""Simulate one training step on fake tensors, with the real model, optimizer and policies, and record its memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
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
from lt_tiled.planner.engines import Engine, Zero, elements, mesh_of, share_weights, trained_weights
from lt_tiled.planner.fake import fake_offloader, fake_weights, without_memory
from lt_tiled.planner.ledger import Allocation, Ledger, Work
from lt_tiled.policies import ActivationCheckpointing, LossShards, SequenceParallel, Tiling
from lt_tiled.tiling.call import EngineNeeds
from lt_tiled.tiling.cut import tiles_to_run
from lt_tiled.training_step.step import shape_of, training_loss

_OF_WEIGHTS = ("weights", "gradients", "optimizer", "gathered", "communication")
PARTS = (*_OF_WEIGHTS, "block inputs", "attention", "MLP", "loss", "rest")
"""What memory is used for, in display order."""


@dataclass(frozen=True)
class Settings:
    """The settings of a step: policies as in a strategy, the engine and its ranks, and what the Trainer sets."""

    tiling: Tiling | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    loss: LossShards | None = None
    sequence_parallel: SequenceParallel | None = None
    engine: Engine = field(default_factory=Engine)
    dtype: torch.dtype = torch.float32  # of the weights
    autocast: torch.dtype | None = None  # of mixed precision
    accumulate: int = 1  # batches per optimizer step
    gpu: bool = False  # where the optimizer updates all weights at once


@dataclass(frozen=True)
class Plan:
    """The predicted step of one rank: its memory and its work."""

    name: str
    """The class of the module."""
    sequences: int
    """The batch size of a rank, or of the ranks that share a sequence."""
    tokens: int
    settings: Settings
    peak: int
    """Bytes."""
    peak_at: int
    """The moment of the peak."""
    phases: dict[str, int]
    """The moment at which each phase began."""
    end: int
    allocations: list[Allocation]
    """The allocations that were alive in the step."""
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    """With the recompute."""
    offloaded: OffloadStats = field(default_factory=OffloadStats)
    weights: int = 0
    """The number of weights of the model, on all ranks together."""
    trained: int = 0
    """The number of those that get gradients."""

    @property
    def flops(self) -> int:
        """The FLOPs of the forward pass, the backward pass and the recompute."""
        return self.forward.total() + self.backward.total()

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part at the peak, without empty parts."""
        return self.parts_at(self.peak_at)

    @property
    def phase(self) -> str:
        """The phase of the step in which the peak occurs."""
        return next(name for name, start in reversed(self.phases.items()) if start <= self.peak_at)

    def parts_at(self, moment: int) -> dict[str, int]:
        """Return the live bytes of each part at a moment, without empty parts."""
        found = dict[str, int]()
        for part, row in self.over_time().items():
            if nbytes := row[moment - self.phases["forward"]]:
                found[part] = nbytes
        return found

    def over_time(self) -> dict[str, list[int]]:
        """Return the live bytes of each part at every moment from the forward pass on, without empty parts."""
        start = self.phases["forward"]
        rows = dict[str, list[int]]()
        for part in PARTS:
            changes = [0] * (self.end - start + 2)
            for allocation in self.allocations:
                if allocation.part == part:
                    changes[max(allocation.born, start) - start] += allocation.nbytes
                    if allocation.died is not None and allocation.died <= self.end:
                        changes[allocation.died - start] -= allocation.nbytes
            if any(changes):
                rows[part] = list(accumulate(changes))
        return rows


def simulate(module: LightningModule, batch: Any, settings: Settings) -> Plan:
    """Simulate two steps: the second one is like all that follow, with optimizer state and tiled calls that are known.

    The module, which has a Trainer, and the batch are on the meta device.
    """
    trainer = module.trainer
    module = copy.deepcopy(module)  # it gets fake weights, and FSDP's hooks
    module.trainer = trainer
    trainer.strategy.connect(module)
    engine = settings.engine
    phases = dict[str, int]()
    with quiet(), mesh_of(engine) as mesh, without_memory(module) as ledger, ExitStack() as stack:
        # What exists before the first step.
        fake_weights(module, torch.float32 if engine.mixed else None)
        ledger.name([*module.parameters(), *module.buffers()], "weights")
        weights = elements(module.parameters())
        trained = elements(trained_weights(module))
        share_weights(engine, module, ledger, mesh)
        prepared = stack.enter_context(_prepare(module, settings, ledger))
        optimizer = _optimizer_of(module, settings.gpu)
        zero = Zero(engine, module, optimizer, ledger)
        stack.enter_context(first_two_tiles(ledger))

        def begin(phase: str) -> None:
            phases[phase] = ledger.clock + 1
            ledger.begin(phase)
            zero.begin(phase)

        for _ in range(2):
            ledger.restart_peak()
            ledger.work = Work()
            begin("forward")
            fake = apply_to_collection(batch, Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"))
            with torch.autocast("cpu", settings.autocast, enabled=settings.autocast is not None):
                loss = training_loss(module.training_step, module, fake)
            forward = ledger.work.copy()
            if settings.accumulate == 1:
                optimizer.zero_grad()  # at the same place as Lightning
            begin("backward")
            loss.backward()
            del loss
            ledger.name([weight.grad for weight in module.parameters()], "gradients")
            begin("optimizer")
            if not engine.offload_optimizer:
                optimizer.step()
                ledger.name(list(optimizer.state.values()), "optimizer")
            zero.stepped()
        moved = prepared.report().offloaded or OffloadStats()
        return Plan(
            type(module).__name__,
            *shape_of(batch),
            settings,
            ledger.peak,
            ledger.peak_at,
            phases,
            ledger.clock,
            [a for a in ledger.allocations if a.died is None or a.died >= phases["forward"]],
            forward,
            ledger.work - forward,
            OffloadStats(moved.cpu_bytes // 2, moved.disk_bytes // 2),  # of two steps
            weights,
            trained,
        )


def _optimizer_of(module: LightningModule, gpu: bool) -> torch.optim.Optimizer:
    optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    if len(optimizers) != 1:
        raise SimulationError(f"{type(module).__name__} has {len(optimizers)} optimizers: a plan needs one.")
    for group in optimizers[0].param_groups:
        if gpu and group.get("foreach", True) is None:  # then a GPU updates all weights at once
            group["foreach"] = True
    return optimizers[0]


def _prepare(model: nn.Module, settings: Settings, ledger: Ledger) -> Prepared:
    """Apply the policies, without the self-checks, which need values."""
    tiling = settings.tiling
    shared = settings.sequence_parallel
    policies = AppliesPolicies()
    policies.set_policies(
        tiling and replace(tiling, self_check=False, compile=False),
        settings.activation_checkpointing,
        sequence_parallel=shared and replace(shared, self_check=False),
    )
    policies.loss = settings.loss
    if shared:
        # What is read of a process group, seen from its first rank, which has the most tokens and heads. The fake
        # implementations of the exchanges communicate nothing.
        group: Any = SimpleNamespace(group_name="simulated", size=lambda: shared.size, rank=lambda: 0)
        policies.sequence_group = group
    policies.needs = EngineNeeds(zeros_for_unused=settings.engine.stage > 0)
    policies.build_offloader = partial(fake_offloader, partial(ledger.name, part="block inputs"))
    return Prepared(model, policies)


@contextmanager
def first_two_tiles(ledger: Ledger) -> Iterator[None]:
    """Run only two tiles of each size, and count the FLOPs of all.

    The first tile creates the gradient sums; later ones of its size need the memory and FLOPs of the second.
    """

    def run(rows: Iterable[Any]) -> Iterator[Any]:
        works = dict[str, list[Work]]()
        for row in rows:
            alike = works.setdefault(str([_length(leaf) for leaf in tree_leaves(row)]), [])
            if len(alike) < 2:
                before = ledger.work.copy()
                yield row
                alike.append(ledger.work - before)
            else:
                ledger.work += alike[1]

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
