"""What DeepSpeed holds beside the model, of one rank: buckets, gathered weights, and float32 copies of a part of the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lt_tiled.modules.find import walk
from lt_tiled.planner.engines import Engine
from lt_tiled.planner.ledger import Ledger
from lt_tiled.planner.shards import FSDP2, Held, Unit, stepped_on
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
    """What ZeRO-3 allocates (deepspeed/runtime/zero/stage3.py): each module with weights is gathered by itself, a leaf
    as a whole.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.masters = _Masters(engine, ledger, optimizer)

    def find_units(self) -> list[Unit]:
        leaves = [(path, m) for path, m, _ in tile_marks(self.model)]
        inside = {id(part) for _, leaf in leaves for part in leaf.modules()}
        alone = [(path, m) for path, m in walk(self.model) if id(m) not in inside and m._parameters]
        return [Unit(path, m, list(m.parameters())) for path, m in [*leaves, *alone]] + [Unit("", self.model, [])]

    @contextmanager
    def applied(self) -> Iterator[Held]:
        weights = [p for unit in self.units for p in unit.weights]
        trained = [p for p in weights if p.requires_grad]
        ranks, hold = self.engine.ranks, self.ledger.hold
        with ExitStack() as stack:
            if not self.engine.offload_weights:
                stack.callback(hold(sum(-(-p.numel() // ranks) * p.itemsize for p in weights), "weights"))
            if not self.engine.offload_optimizer:
                stack.callback(hold(sum(-(-p.numel() // ranks) * p.itemsize for p in trained), "gradients"))
            if trained:
                stack.callback(hold(self.engine.bucket * trained[0].itemsize, "communication"))
            kept = min(self.engine.live, sum(p.numel() for p in weights))
            stack.callback(hold(kept * weights[0].itemsize, "gathered"))
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
            unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    gather_in_backward = gather_in_forward

    def prefetch(self, unit: Unit) -> None:
        """No further than the bucket for it."""

    def reduce(self, unit: Unit) -> None:
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)  # moved to the bucket
        unit.ready = []


class Zero(Held):
    """What ZeRO-1 and 2 allocate (deepspeed/runtime/zero/stage_1_and_2.py): buckets in the backward, and optimizer
    state in parts.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        self.engine, self.model, self.optimizer, self.ledger = engine, model, optimizer, ledger
        self.masters = _Masters(engine, ledger, optimizer)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.held = ExitStack()

    @contextmanager
    def applied(self) -> Iterator[Held]:
        with ExitStack() as stack:
            if self.engine.name == "zero2":
                for weight in self.trained:
                    stack.callback(weight.register_post_accumulate_grad_hook(self._arrived).remove)
            copies = {id(p): self.masters.copy_of(p) for p in stepped_on(self.optimizer)}
            for group in self.optimizer.param_groups:
                group["params"] = [copies[id(p)] for p in group["params"]]
            stack.callback(self.held.close)
            yield self

    def begin(self, phase: str) -> None:
        if phase == "backward" and self.trained:
            nbytes = self.engine.bucket * self.trained[0].itemsize
            release = [self.ledger.hold(nbytes, "communication") for _ in range(self.engine.buckets)]
            for done in release:
                self.held.callback(done)
        if phase == "optimizer":
            self.held.close()
            self.masters.give_gradients()

    def stepped(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)
        self.masters.offload()

    def _arrived(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        nn.ParameterList([weight]).zero_grad(set_to_none=True)
        self.held.callback(self.ledger.hold(-(-weight.nbytes // self.engine.ranks), "gradients"))
