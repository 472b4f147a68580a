"""What DeepSpeed allocates on one rank: buckets, gathered weights, and float32 copies of its part of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lt_tiled._training_step import stepped_on
from lt_tiled.modules.find import walk
from lt_tiled.planner.engines import Engine
from lt_tiled.planner.ledger import Ledger
from lt_tiled.planner.shards import FSDP2, EngineMemory, Unit
from lt_tiled.tiling.api import tile_marks


class _Masters:
    """The float32 copies of a rank's part of the weights on which DeepSpeed's optimizers step."""

    def __init__(self, engine: Engine, ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
        self.engine, self.ledger, self.optimizer = engine, ledger, optimizer

    def copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(torch.empty(-(-weight.numel() // self.engine.ranks)), weight.requires_grad)
        if self.engine.offload_optimizer:
            self.ledger.drop(master)
        else:
            self.ledger.name(master, "optimizer")
        return master

    def give_gradients(self) -> None:
        for master in stepped_on(self.optimizer):
            master.backward(torch.empty_like(master))

    def offload(self) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and self.engine.offload_optimizer:
                    self.ledger.drop(value)


class Zero3(FSDP2):
    """Allocates what ZeRO-3 allocates: each module's own weights are gathered alone, those of a leaf together.

    The order is that of deepspeed/runtime/zero/stage3.py.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.masters = _Masters(engine, ledger, optimizer)

    def find_fsdp_units(self) -> list[Unit]:
        leaves = [(path, m) for path, m, _ in tile_marks(self.model)]
        inside = {id(part) for _, leaf in leaves for part in leaf.modules()}
        alone = [(path, m) for path, m in walk(self.model) if id(m) not in inside and m._parameters]
        return [Unit(path, m, list(m.parameters())) for path, m in [*leaves, *alone]] + [Unit("", self.model, [])]

    @contextmanager
    def applied(self) -> Iterator[EngineMemory]:
        engine, weights = self.engine, [p for unit in self.fsdp_units for p in unit.weights]
        trained = [p for p in weights if p.requires_grad]
        kept = min(engine.live, sum(p.numel() for p in weights))
        amounts = {"gathered": kept * weights[0].itemsize}
        if not engine.offload_weights:
            amounts["weights"] = sum(-(-p.numel() // engine.ranks) * p.itemsize for p in weights)
        if not engine.offload_optimizer:
            amounts["gradients"] = sum(-(-p.numel() // engine.ranks) * p.itemsize for p in trained)
        if trained:
            amounts["communication"] = engine.bucket * trained[0].itemsize
        with ExitStack() as stack:
            for part, nbytes in amounts.items():
                stack.callback(self.ledger.hold(nbytes, part))
            stack.enter_context(super().applied())
            yield self

    def shard(self, weight: nn.Parameter) -> nn.Parameter:
        return self.masters.copy_of(weight)

    def begin(self, phase: str) -> None:
        if phase == "optimizer":
            self.masters.give_gradients()

    def stepped(self) -> None:
        self.optimizer.zero_grad()
        self.masters.offload()

    def gather_in_forward(self, unit: Unit) -> None:
        if not self.engine.live:
            unit.gathered = self.hold(unit)

    gather_in_backward = gather_in_forward

    def prefetch(self, unit: Unit) -> None:
        """Allocate nothing: prefetched weights are part of the live ones."""

    def reduce(self, unit: Unit) -> None:
        for p in unit.ready:
            p.grad = None  # moved to the bucket
        unit.ready = []


class Zero(EngineMemory):
    """Allocates what ZeRO-1 and ZeRO-2 allocate: buckets in the backward pass, and a part of the optimizer state.

    The order is that of deepspeed/runtime/zero/stage_1_and_2.py.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        self.engine, self.model, self.optimizer, self.ledger = engine, model, optimizer, ledger
        self.masters = _Masters(engine, ledger, optimizer)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.held = ExitStack()

    @contextmanager
    def applied(self) -> Iterator[EngineMemory]:
        with ExitStack() as stack:
            if self.engine.name == "zero2":
                for weight in self.trained:
                    stack.callback(weight.register_post_accumulate_grad_hook(self._after_gradient).remove)
            copies = {id(p): self.masters.copy_of(p) for p in stepped_on(self.optimizer)}
            for group in self.optimizer.param_groups:
                group["params"] = [copies[id(p)] for p in group["params"]]
            stack.callback(self.held.close)
            yield self

    def begin(self, phase: str) -> None:
        if phase == "backward" and self.trained:
            for _ in range(self.engine.buckets):
                self.held.callback(self.ledger.hold(self.engine.bucket * self.trained[0].itemsize, "communication"))
        if phase == "optimizer":
            self.held.close()
            self.masters.give_gradients()

    def stepped(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)
        self.masters.offload()

    def _after_gradient(self, weight: Tensor) -> None:
        weight.grad = None
        self.held.callback(self.ledger.hold(-(-weight.nbytes // self.engine.ranks), "gradients"))
