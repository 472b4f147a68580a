"""Simulate one training step on fake tensors, with the real model, optimizer and policies, and record its memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from lt_tiled.planner.engines import mesh_of, phases, share_weights
from lt_tiled.planner.fake import fake_offloader, without_memory
from lt_tiled.planner.job import Job
from lt_tiled.planner.ledger import Allocation, Ledger, Work
from lt_tiled.tiling.cut import tiles_to_run
from lt_tiled.training_step.step import shape_of, training_loss, with_length

_OF_WEIGHTS = ("weights", "gradients", "optimizer", "gathered", "communication")
PARTS = (*_OF_WEIGHTS, "block inputs", "attention", "MLP", "loss", "rest")
"""What memory is used for, in display order."""


@dataclass(frozen=True)
class Plan:
    """The predicted step of one rank: its memory and its work. Moments are numbers of the ledger's events."""

    job: Job
    sequences: int  # the batch size of a rank, or of the ranks that share a sequence
    tokens: int  # of a sequence
    peak: int  # bytes
    peak_at: int  # the moment of the peak
    phases: dict[str, int]  # the moment at which each phase began
    events: list[tuple[Allocation, int]]  # the ledger's
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)  # with the recompute
    offloaded: OffloadStats = field(default_factory=OffloadStats)

    @property
    def flops(self) -> int:
        """The FLOPs of the forward pass, the backward pass and the recompute."""
        return self.forward.total() + self.backward.total()

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part at the peak, without empty parts."""
        return self.parts_at(self.peak_at)

    def parts_at(self, moment: int) -> dict[str, int]:
        """Return the live bytes of each part at a moment, without empty parts."""
        return {part: row[moment] for part, row in self.over_time.items() if row[moment]}

    @cached_property
    def over_time(self) -> dict[str, list[int]]:
        """The live bytes of each part at every moment, without parts that stay empty."""
        rows = dict[str, list[int]]()
        for part in PARTS:
            changes = [sign * allocation.nbytes * (allocation.part == part) for allocation, sign in self.events]
            row = list(accumulate(changes, initial=0))
            if any(row):
                rows[part] = row
        return rows


def plan(job: Job, tokens: int | None = None) -> Plan:
    """Return the plan of a job, by default for its own sequence length.

    It simulates two steps: the second is like all that follow, with optimizer state and tiled calls that are known.

    Raises:
        SimulationError: If an operation needs values, or the module optimizes manually.
        ValueError: If the batch has no sequences and ``tokens`` is given.
    """
    batch = job.batch if tokens is None else with_length(job.batch, tokens)
    module = copy.deepcopy(job.module)  # it gets fake weights, and FSDP's hooks
    module.trainer = job.module.trainer
    with quiet(), ExitStack() as stack:
        # 1. What exists before the first step.
        mesh = mesh_of(job.engine, stack)
        ledger = stack.enter_context(without_memory(module))
        share_weights(job.engine, module, ledger, mesh)
        prepared = stack.enter_context(_prepare(module, job, ledger))
        optimizer = _optimizer_of(module, job.gpu)
        phase = phases(job.engine, module, optimizer, ledger)
        stack.callback(tiles_to_run.reset, tiles_to_run.set(partial(first_two_tiles, ledger)))
        for _ in range(2):
            # 2. The forward pass.
            next(phase)
            fake = apply_to_collection(batch, Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"))
            with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
                loss = training_loss(module.training_step, module, fake)
            forward = ledger.work.copy()
            if job.accumulate == 1:
                optimizer.zero_grad()  # at the same place as Lightning
            # 3. The backward pass.
            next(phase)
            loss.backward()
            del loss
            ledger.name([weight.grad for weight in module.parameters()], "gradients")
            # 4. The optimizer's step.
            next(phase)
            if not job.engine.offloads("optimizer"):
                optimizer.step()
                ledger.name(list(optimizer.state.values()), "optimizer")
        # 5. What the second step took.
        moved = prepared.report().offloaded or OffloadStats()
        return Plan(
            job,
            *shape_of(batch),
            ledger.peak,
            ledger.peak_at,
            ledger.phases,
            list(ledger.events),
            forward,
            ledger.work - forward,
            OffloadStats(moved.cpu_bytes // 2, moved.disk_bytes // 2),  # of two steps
        )


def _optimizer_of(module: LightningModule, gpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer of a module; one without a choice updates all weights at once on a GPU."""
    strategy = module.trainer.strategy
    strategy.connect(module)
    strategy.setup_optimizers(module.trainer)
    for group in strategy.optimizers[0].param_groups:
        if gpu and group.get("foreach", True) is None:
            group["foreach"] = True
    return strategy.optimizers[0]


def _prepare(model: nn.Module, job: Job, ledger: Ledger) -> Prepared:
    """Apply the policies, without the self-checks, which need values."""
    tiling = job.tiling
    shared = job.sequence_parallel
    policies = AppliesPolicies()
    policies.tiling = tiling and replace(tiling, self_check=False, compile=False)
    policies.activation_checkpointing = job.activation_checkpointing
    policies.loss = job.loss
    policies.sequence_parallel = shared and replace(shared, self_check=False)
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
