"""Simulate one training step on fake tensors, with the real model, optimizer and policies, and record its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled._log import quiet
from lt_tiled._prepare import AppliesPolicies, Prepared
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.planner.engines import Engine, memory_of, mesh_of
from lt_tiled.planner.fake import fake_group, fake_offloader, fake_weights, without_memory
from lt_tiled.planner.ledger import Allocation, Ledger, Work
from lt_tiled.planner.where import FakeLedger
from lt_tiled.policies import ActivationCheckpointing, LossShards, SequenceParallel, Tiling
from lt_tiled.tiling.call import EngineNeeds
from lt_tiled.tiling.cut import tiles_to_run
from lt_tiled.training_step.step import stepped_on

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
        clip: Whether gradients are clipped by their norm.
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
    clip: bool = False
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


def simulate(
    model: nn.Module,
    step: Callable[[], Tensor],
    make_optimizer: Callable[[], torch.optim.Optimizer],
    settings: Settings,
) -> Simulation:
    """Simulate a step after the first, when optimizer state and the last step's gradients exist.

    The model gets fake weights, and its engine. ``step`` runs the forward pass and returns the loss.
    """
    engine, phases = settings.engine, dict[str, int]()
    with quiet(), mesh_of(engine) as mesh, without_memory(model) as ledger, ExitStack() as stack:
        fake_weights(model, torch.float32 if engine.mixed else None)
        ledger.name([*model.parameters(), *model.buffers()], "weights")
        weights = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        memory = stack.enter_context(memory_of(engine, model, ledger, mesh))
        prepared = stack.enter_context(_prepare(model, settings, ledger))
        optimizer = make_optimizer()
        if settings.gpu:
            for group in optimizer.param_groups:
                if group.get("foreach", True) is None:
                    group["foreach"] = True
        memory.replace_weights(optimizer)
        if not engine.offload_optimizer:
            _run_first_step(optimizer, ledger)
        memory.stepped()
        stack.enter_context(first_two_tiles(ledger))

        def begin(phase: str) -> None:
            phases[phase] = ledger.clock + 1
            ledger.begin(phase)
            memory.begin(phase)

        # All above happened before the step.
        ledger.restart_peak()
        start, ledger.work = ledger.clock, Work()
        begin("forward")
        with torch.autocast("cpu", settings.autocast, enabled=settings.autocast is not None):
            loss = step()
        forward = ledger.work
        if settings.accumulate == 1:
            optimizer.zero_grad()  # at the same place as Lightning
        begin("backward")
        loss.backward()
        del loss
        _name_gradients(optimizer, ledger)
        begin("optimizer")
        backward = ledger.work - forward
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(stepped_on(optimizer), 1.0)
        if not engine.offload_optimizer:
            optimizer.step()
        memory.stepped()
        report = prepared.report()
        moments = (ledger.peak, ledger.peak_at, phases, ledger.clock)
        alive = tuple([a for a in ledger.allocations if a.died is None or a.died > start])
        return Simulation(*moments, alive, forward, backward, report.offloaded, weights, trained)


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
        seen: Counter[Hashable] = Counter()
        work: dict[Hashable, Work] = {}
        for row in rows:
            leaves = tree_leaves(row)
            size = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
            size += tuple(leaf.stop - leaf.start for leaf in leaves if isinstance(leaf, slice))
            seen[size] += 1
            if seen[size] > 2:
                ledger.work += work[size]
                continue
            before = ledger.work
            yield row
            work[size] = ledger.work - before

    token = tiles_to_run.set(run)
    try:
        yield
    finally:
        tiles_to_run.reset(token)


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
