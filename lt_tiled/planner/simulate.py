"""One training step on fake tensors, with the real model, optimizer and policies, and every byte of it in a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled._log import quiet
from lt_tiled._prepare import Prepared
from lt_tiled.offload.stats import OffloadStats
from lt_tiled.planner.engines import SINGLE, Engine
from lt_tiled.planner.fake import fake_offloader, fake_weights, without_memory
from lt_tiled.planner.flops import Flops
from lt_tiled.planner.ledger import Allocation, Ledger
from lt_tiled.planner.shards import FSDP, FSDP2, Held, stepped_on
from lt_tiled.planner.where import Whereabouts
from lt_tiled.planner.zero import Zero, Zero3
from lt_tiled.policies import Checkpointing, Tiling

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "communication",
    "boundaries",
    "attention",
    "MLP",
    "loss",
    "rest",
)
"""What memory is for, in the order in which it is shown."""


@dataclass(frozen=True)
class Subject:
    """What is simulated.

    Attributes:
        model: The model, on the meta device or any other; its weights are replaced by fake ones.
        step: Runs the forward and returns the loss; tensors that it makes are fake.
        optimizer: Makes the optimizer.
    """

    model: nn.Module
    step: Callable[[], Tensor]
    optimizer: Callable[[], torch.optim.Optimizer]


@dataclass(frozen=True)
class Settings:
    """With what it runs.

    Attributes:
        tiling: As of a strategy.
        checkpointing: As of a strategy.
        engine: What is sharded, and over how many ranks.
        autocast: The dtype of mixed precision.
        accumulate: Batches per optimizer step.
        clip: Whether gradients are clipped by their norm.
        foreach: Whether the optimizer updates all weights at once, as torch's do on a GPU.
    """

    tiling: Tiling | None = None
    checkpointing: Checkpointing | None = None
    engine: Engine = SINGLE
    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip: bool = False
    foreach: bool = False


@dataclass(frozen=True)
class Simulation:
    """What a step held and did, of one rank."""

    peak: int
    """Bytes."""
    peak_at: int
    """The moment of it."""
    phases: dict[str, int]
    """When each phase began."""
    end: int
    allocations: tuple[Allocation, ...]
    """Those that were alive in the step."""
    forward_flops: int
    flops: int
    """Of the forward, the backward and what it recomputes."""
    offloaded: OffloadStats | None

    def parts_at(self, moment: int) -> dict[str, int]:
        """The bytes of each part that were alive then, those of none left out."""
        sums = dict.fromkeys(PARTS, 0)
        for a in self.allocations:
            if a.born <= moment and (a.died is None or a.died > moment):
                sums[a.part] += a.nbytes
        return {part: nbytes for part, nbytes in sums.items() if nbytes}

    def over_time(self) -> dict[str, list[int]]:
        """The bytes of each part at every moment of the step, from the forward on."""
        start = self.phases["forward"]
        changes = {part: [0] * (self.end - start + 2) for part in PARTS}
        for a in self.allocations:
            changes[a.part][max(a.born, start) - start] += a.nbytes
            if a.died is not None and a.died <= self.end:
                changes[a.part][a.died - start] -= a.nbytes
        return {part: list(accumulate(row))[:-1] for part, row in changes.items() if any(row)}


def simulate(subject: Subject, settings: Settings) -> Simulation:
    """Run a step of a training that is under way: optimizer state and the last step's gradients are there.

    Raises:
        SimulationError: With the operation that needs values.
        ValueError: If the policies do not fit the model.
    """
    where = Whereabouts(subject.model)
    with quiet(), without_memory(where), Ledger(where.now) as ledger, where:
        where.ledger = ledger
        return _run(subject, settings, where, ledger)


def _run(subject: Subject, settings: Settings, where: Whereabouts, ledger: Ledger) -> Simulation:
    model, engine = subject.model, settings.engine
    fake_weights(model)
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.name(tensor, "weights")
    tiling = None if settings.tiling is None else replace(settings.tiling, self_check=False, compile=False)
    with Prepared(model, tiling, settings.checkpointing, build=fake_offloader) as prepared:
        optimizer = subject.optimizer()
        for group in optimizer.param_groups:
            if settings.foreach and group.get("foreach", True) is None:
                group["foreach"] = True
        with _engine(engine, model, optimizer, ledger) as held:
            _prime(optimizer, ledger, where)
            held.stepped()
            ledger.restart_peak()
            start, phases = ledger.clock, {}

            def begin(phase: str) -> None:
                where.begin(phase)
                phases[phase] = ledger.clock + 1
                held.begin(phase)

            begin("forward")
            with Flops() as counter:
                with _autocast(settings.autocast):
                    loss = subject.step()
                forward = counter.total
                if settings.accumulate == 1:
                    optimizer.zero_grad()  # where Lightning does it
                begin("backward")
                loss.backward()
                del loss
            _name_gradients(optimizer, ledger)
            begin("optimizer")
            if settings.clip:
                torch.nn.utils.clip_grad_norm_(stepped_on(optimizer), 1.0)
            optimizer.step()
            held.stepped()
            offloaded = prepared.offloader.so_far() if prepared.offloader is not None else None
            end = ledger.clock
    alive = tuple(a for a in ledger.allocations if a.died is None or a.died > start)
    return Simulation(ledger.peak, ledger.peak_at, phases, end, alive, forward, counter.total, offloaded)


@contextmanager
def _engine(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> Iterator[Held]:
    """Book what an engine holds while the step runs, and let the optimizer step on shards where there are some."""
    if engine.name in _ENGINES:
        with _ENGINES[engine.name](engine, model, optimizer, ledger).applied() as held:
            yield held
        return
    buckets = (
        0 if engine.name == "single" or engine.views else sum(p.nbytes for p in model.parameters() if p.requires_grad)
    )
    release = ledger.hold(buckets, "communication")
    yield Held()
    release()


_ENGINES: dict[str, type[FSDP2 | Zero]] = {"fsdp": FSDP, "fsdp2": FSDP2, "zero1": Zero, "zero2": Zero, "zero3": Zero3}


def _prime(optimizer: torch.optim.Optimizer, ledger: Ledger, where: Whereabouts) -> None:
    """Let a first step have been: its gradients and the optimizer's state are there."""
    where.begin("optimizer")
    for weight in stepped_on(optimizer):
        if weight.requires_grad:
            weight.backward(torch.empty_like(weight))
    optimizer.step()
    _name_gradients(optimizer, ledger)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                ledger.name(value, "optimizer")


def _name_gradients(optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
    for weight in stepped_on(optimizer):
        if weight.grad is not None:
            ledger.name(weight.grad, "gradients")


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
