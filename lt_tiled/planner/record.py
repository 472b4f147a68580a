"""A real step, booked as a simulated one is."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lt_tiled.planner.ledger import Allocation, Ledger
from lt_tiled.planner.simulate import Simulation
from lt_tiled.planner.where import Whereabouts


class Recording:
    """Books a step between :meth:`start` and :meth:`stop`, which stands in the same thread.

    On a CPU every storage is booked for the part that it serves. On CUDA, whose backward runs in threads of its own,
    the allocator's trace is read (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html), which knows no parts.

    Args:
        model: The model.
        wrapped: What the engine made of it.
        optimizers: Whose state is there already.
        device: Where the model is.
    """

    def __init__(
        self, model: nn.Module, wrapped: nn.Module | None, optimizers: list[torch.optim.Optimizer], device: torch.device
    ) -> None:
        self.model, self.wrapped, self.optimizers, self.device = model, wrapped, optimizers, device
        self.phases: dict[str, int] = {}
        self._stack = ExitStack()
        self._where: Whereabouts | None = None
        self._ledger: Ledger | None = None
        self._base = 0

    def start(self) -> None:
        """Begin."""
        if self.device.type == "cuda":
            self._base = torch.cuda.memory_allocated(self.device)
            torch.cuda.memory._record_memory_history(context=None)
        else:
            self._where = Whereabouts(self.model)
            self._ledger = self._stack.enter_context(Ledger(self._where.now, only=self.device.type))
            self._where.ledger = self._ledger
            self._stack.enter_context(self._where)
            self._book_what_is_there(self._ledger)
        self.begin("forward")

    def _book_what_is_there(self, ledger: Ledger) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            ledger.book(tensor, "weights")
            if tensor.grad is not None:
                ledger.book(tensor.grad, "gradients")
        for optimizer in self.optimizers:
            for state in getattr(optimizer, "state", {}).values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        ledger.book(value, "optimizer")
        if isinstance(self.wrapped, DistributedDataParallel) and not self.wrapped.gradient_as_bucket_view:
            ledger.hold(sum(p.nbytes for p in self.model.parameters() if p.requires_grad), "communication")
        ledger.restart_peak()

    def begin(self, phase: str) -> None:
        """Enter the forward, the backward or the optimizer's step."""
        if self._where is not None:
            self._where.begin(phase)
        self.phases.setdefault(phase, self._moment())

    def _moment(self) -> int:
        if self._ledger is not None:
            return self._ledger.clock + 1
        return len(_trace(self.device)) + 1

    def stop(self) -> Simulation:
        """End, and return what was booked."""
        if self._ledger is not None:
            self._stack.close()
            ledger = self._ledger
            return Simulation(
                ledger.peak, ledger.peak_at, self.phases, ledger.clock, tuple(ledger.allocations), 0, 0, None
            )
        events = _trace(self.device)
        torch.cuda.memory._record_memory_history(enabled=None)
        return _of_trace(events, self._base, self.phases)


def _trace(device: torch.device) -> list[dict[str, Any]]:
    index = device.index if device.index is not None else torch.cuda.current_device()
    found: list[dict[str, Any]] = [
        e for e in torch.cuda.memory._snapshot()["device_traces"][index] if e["action"] in ("alloc", "free_completed")
    ]
    return found


def _of_trace(events: list[dict[str, Any]], base: int, phases: dict[str, int]) -> Simulation:
    """The allocator's events as allocations; what was there before is one of them."""
    allocations = [Allocation(base, "weights", "", 0)]
    live: dict[int, Allocation] = {}
    now = peak = base
    peak_at = 0
    for moment, event in enumerate(events, 1):
        if event["action"] == "alloc":
            live[event["addr"]] = Allocation(event["size"], "rest", "", moment)
            allocations.append(live[event["addr"]])
            now += event["size"]
            if now > peak:
                peak, peak_at = now, moment
        elif (ended := live.pop(event["addr"], None)) is not None:
            ended.died = moment
            now -= ended.nbytes
        else:  # of what was there before
            now -= event["size"]
            allocations.append(Allocation(-event["size"], "weights", "", moment))
    return Simulation(peak, peak_at, phases, len(events), tuple(allocations), 0, 0, None)
