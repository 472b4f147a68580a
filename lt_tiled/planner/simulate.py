"""Simulate one training step on fake tensors, with the real model, optimizer and policies, and record its memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lt_tiled._log import quiet
from lt_tiled._prepare import AppliesPolicies, Prepared
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.planner.engines import Engine, Zero, elements, mesh_of, share_weights, trained_weights
from lt_tiled.planner.fake import fake_offloader, fake_weights, without_memory
from lt_tiled.planner.ledger import Allocation, Ledger, Work
from lt_tiled.policies import ActivationCheckpointing, LossShards, SequenceParallel, Tiling
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

    def __str__(self) -> str:
        """Return one line: the engine, and policies with the fields that are not their defaults."""
        parts: list[str] = [self.engine.name]
        if self.engine.ranks > 1:
            parts = [f"{self.engine.name} over {self.engine.ranks} ranks"]
        for policy in (self.tiling, self.activation_checkpointing, self.sequence_parallel):
            if policy is not None:
                changed = list[str]()
                for option in fields(policy):
                    value = getattr(policy, option.name)
                    if value != option.default:
                        changed.append(f"{option.name}={value!r}")
                parts.append(f"{type(policy).__name__}({', '.join(changed)})")
        if self.loss:
            parts.append("tiled loss")
        return ", ".join(parts)


@dataclass(frozen=True)
class Plan:
    """The predicted step of one rank: its memory and its work. Moments are numbers of the ledger's events."""

    name: str  # the class of the module
    sequences: int  # the batch size of a rank, or of the ranks that share a sequence
    tokens: int  # of a sequence
    settings: Settings
    peak: int  # bytes
    peak_at: int  # the moment of the peak
    phases: dict[str, int]  # the moment at which each phase began
    events: list[tuple[Allocation, int]]  # the ledger's
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)  # with the recompute
    offloaded: OffloadStats = field(default_factory=OffloadStats)
    weights: int = 0  # the number of weights of the model, on all ranks together
    trained: int = 0  # the number of those that get gradients

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
        return [name for name, start in self.phases.items() if start < self.peak_at][-1]

    def parts_at(self, moment: int) -> dict[str, int]:
        """Return the live bytes of each part at a moment, without empty parts."""
        live = Counter[str]()
        for allocation, sign in self.events[:moment]:
            live[allocation.part] += sign * allocation.nbytes
        return {part: live[part] for part in PARTS if live[part]}

    def over_time(self) -> dict[str, list[int]]:
        """Return the live bytes of each part at every moment from the forward pass on, without empty parts."""
        start = self.phases["forward"]
        rows = dict[str, list[int]]()
        for part in PARTS:
            changes = [sign * allocation.nbytes * (allocation.part == part) for allocation, sign in self.events]
            row = list(accumulate(changes))[start - 1 :]
            if any(row):
                rows[part] = row
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
    with quiet(), ExitStack() as stack:
        # 1. What exists before the first step.
        mesh = mesh_of(engine, stack)
        ledger = stack.enter_context(without_memory(module))
        fake_weights(module, torch.float32 if engine.mixed else None)
        ledger.name([*module.parameters(), *module.buffers()], "weights")
        weights = elements(module.parameters())
        trained = elements(trained_weights(module))
        share_weights(engine, module, ledger, mesh)
        prepared = stack.enter_context(_prepare(module, settings, ledger))
        optimizer = _optimizer_of(module, settings.gpu)
        zero = Zero(engine, module, optimizer, ledger)
        stack.callback(tiles_to_run.reset, tiles_to_run.set(partial(first_two_tiles, ledger)))
        # 2. The steps.
        for _ in range(2):
            zero.begin("forward")
            ledger.begin("forward")
            fake = apply_to_collection(batch, Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"))
            with torch.autocast("cpu", settings.autocast, enabled=settings.autocast is not None):
                loss = training_loss(module.training_step, module, fake)
            forward = ledger.work.copy()
            if settings.accumulate == 1:
                optimizer.zero_grad()  # at the same place as Lightning
            zero.begin("backward")
            ledger.begin("backward")
            loss.backward()
            del loss
            ledger.name([weight.grad for weight in module.parameters()], "gradients")
            zero.begin("optimizer")
            ledger.begin("optimizer")
            if not engine.offload_optimizer:
                optimizer.step()
                ledger.name(list(optimizer.state.values()), "optimizer")
        # 3. What the last one took.
        moved = prepared.report().offloaded or OffloadStats()
        return Plan(
            type(module).__name__,
            *shape_of(batch),
            settings,
            ledger.peak,
            ledger.peak_at,
            ledger.phases,
            list(ledger.events),
            forward,
            ledger.work - forward,
            OffloadStats(moved.cpu_bytes // 2, moved.disk_bytes // 2),  # of two steps
            weights,
            trained,
        )


def _optimizer_of(module: LightningModule, gpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer of a module; one without a choice updates all weights at once on a GPU."""
    strategy = module.trainer.strategy
    strategy.setup_optimizers(module.trainer)
    for group in strategy.optimizers[0].param_groups:
        if gpu and group.get("foreach", True) is None:
            group["foreach"] = True
    return strategy.optimizers[0]


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
    policies.build_offloader = partial(fake_offloader, partial(ledger.name, part="block inputs"))
    return Prepared(model, policies)


def first_two_tiles(ledger: Ledger, rows: Iterable[Any]) -> Iterator[Any]:
    """Yield the first two tiles of a call, and count the FLOPs of all.

    The first one creates the gradient sums; the others, which have as many tokens or one less, need the memory and the
    FLOPs of the second.
    """
    work = Work()
    for index, row in enumerate(rows):
        if index < 2:
            before = ledger.work.copy()
            yield row
            work = ledger.work - before
        else:
            ledger.work += work
