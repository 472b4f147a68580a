"""Recordings of real steps, in the form of simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lt_tiled.planner.ledger import Ledger
from lt_tiled.planner.simulate import Simulation
from lt_tiled.planner.where import ModelLedger
from lt_tiled.training_step.step import tensors_of


class Recording:
    """Records a step from the constructor to :meth:`stop`, in the same thread.

    On a CPU every storage is recorded with its part. On CUDA, where the backward pass has its own threads, it reads the
    allocator's trace (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html), which has no parts.

    Args:
        trainer: The Trainer that runs the step.
    """

    def __init__(self, trainer: Any) -> None:
        self.device: torch.device = trainer.strategy.root_device
        self.phases: dict[str, int] = {}
        self._ledger: ModelLedger | None = None
        if self.device.type == "cuda":
            self._base = torch.cuda.memory_allocated(self.device)
            torch.cuda.memory._record_memory_history(context=None)
        else:
            self._ledger = ModelLedger(trainer.lightning_module, self.device.type).__enter__()
            _book_existing(self._ledger, trainer)
        self.begin("forward")

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase."""
        if self._ledger is not None:
            self._ledger.begin(phase)
        # The ledger of a trace counts the memory from before as its first moment.
        clock = len(_trace(self.device)) + 1 if self._ledger is None else self._ledger.clock
        self.phases.setdefault(phase, clock + 1)

    def stop(self) -> Simulation:
        """End the recording and return it."""
        ledger: Ledger
        if self._ledger is None:
            ledger = _ledger_of(_trace(self.device), self._base)
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            ledger = self._ledger
            ledger.__exit__(None, None, None)
        return Simulation(ledger.peak, ledger.peak_at, self.phases, ledger.clock, tuple(ledger.allocations))


def _book_existing(ledger: Ledger, trainer: Any) -> None:
    model: nn.Module = trainer.lightning_module
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.book(tensor, "weights")
        if tensor.grad is not None:
            ledger.book(tensor.grad, "gradients")
    for optimizer in trainer.optimizers:
        for value in tensors_of([*getattr(optimizer, "state", {}).values()]):
            ledger.book(value, "optimizer")
    wrapped = trainer.model
    if isinstance(wrapped, DistributedDataParallel) and not wrapped.gradient_as_bucket_view:
        ledger.hold(sum(p.nbytes for p in model.parameters() if p.requires_grad), "communication")
    ledger.restart_peak()


def _trace(device: torch.device) -> list[dict[str, Any]]:
    index = device.index if device.index is not None else torch.cuda.current_device()
    events = torch.cuda.memory._snapshot()["device_traces"][index]
    return [event for event in events if event["action"] in ("alloc", "free_completed")]


def _ledger_of(events: list[dict[str, Any]], base: int) -> Ledger:
    """Return a ledger of the allocator's events, which begins with the memory from before."""
    ledger, live = Ledger(), dict[int, Callable[[], None]]()
    ledger.hold(base, "weights")
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = ledger.hold(event["size"], "rest")
        elif event["addr"] in live:
            live.pop(event["addr"])()
        else:
            ledger.hold(-event["size"], "weights")
    return ledger
