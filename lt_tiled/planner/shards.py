"""What FSDP and FSDP2 allocate on one rank: shards in place of weights, and the all-gathered weights of FSDP units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled._training_step import nothing
from lt_tiled.modules.find import find_blocks
from lt_tiled.planner.engines import Engine
from lt_tiled.planner.ledger import Ledger

Release = Callable[[], None]


class EngineMemory:
    """What an engine allocates on one rank: this base class holds DDP's gradient buckets."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        self.engine, self.model, self.optimizer, self.ledger = engine, model, optimizer, ledger
        self.trained = [p for p in model.parameters() if p.requires_grad]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Record what the engine allocates, and let the optimizer step on shards if there are any."""
        copies = self.engine.name == "ddp" and not self.engine.views
        release = self.ledger.hold(sum(p.nbytes for p in self.trained if copies), "communication")
        yield
        release()

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase."""

    def stepped(self) -> None:
        """Follow the optimizer's step."""


@dataclass
class Unit:
    """An FSDP unit: weights that are all-gathered together."""

    path: str
    module: nn.Module
    weights: list[nn.Parameter]
    gathered: Release | None = None
    prefetched: Release | None = None
    in_backward: bool = False
    waiting: int = 0
    """The number of gradients still to come."""
    ready: list[nn.Parameter] = field(default_factory=list)

    def reshard(self) -> None:
        """Release the gathered weights."""
        if self.gathered is not None:
            self.gathered()
            self.gathered = None


class FSDP2(EngineMemory):
    """Allocates what ``fully_shard`` allocates: shards, and full weights while their FSDP unit runs.

    The order is that of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.fsdp_units = self.find_fsdp_units()
        self.shards: dict[int, nn.Parameter] = {}
        self.order: list[Unit] = []
        self.gather_buffer: Release = nothing
        self.reduce_buffer: Release = nothing

    def find_fsdp_units(self) -> list[Unit]:
        """Return one FSDP unit for each block and, last, the root, which is the user's module."""
        found, taken = [], set[int]()
        for path, module in [*find_blocks(self.model), ("", self.model)]:
            found.append(Unit(path, module, [p for p in module.parameters() if id(p) not in taken]))
            taken.update(map(id, found[-1].weights))
        return found

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for unit in self.fsdp_units:
                for weight in unit.weights:
                    self.ledger.drop(weight)
                    self.shards[id(weight)] = self.shard(weight)
                    if weight.requires_grad:
                        hook = partial(self._after_gradient, unit)
                        stack.callback(weight.register_post_accumulate_grad_hook(hook).remove)
            for unit in self.fsdp_units[:-1]:  # the root runs from the first phase to the second
                before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
                stack.callback(unit.module.register_forward_pre_hook(before).remove)
                stack.callback(unit.module.register_forward_hook(after, always_call=True).remove)
            for group in self.optimizer.param_groups:
                group["params"] = [self.shards[id(p)] for p in group["params"]]
            yield

    def shard(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the shard of a weight on which the optimizer steps."""
        rows = weight.shape[0] if weight.dim() else 1
        shape = (-(-rows // self.engine.ranks), *weight.shape[1:])
        dtype = torch.float32 if self.engine.mixed else weight.dtype
        shard = nn.Parameter(torch.empty(shape, dtype=dtype), weight.requires_grad)
        self.ledger.name(shard, "weights")
        return shard

    def begin(self, phase: str) -> None:
        self.gather_buffer()
        self.reduce_buffer()
        root = self.fsdp_units[-1]
        if phase == "forward":
            self.gather_in_forward(root)
        elif phase == "backward":
            self._append(root)
            self._begin_backward(root)

    def hold(self, unit: Unit) -> Release:
        """Record the gathered weights of an FSDP unit."""
        return self.ledger.hold(sum(p.nbytes for p in unit.weights), "gathered", unit.path)

    def gather_in_forward(self, unit: Unit) -> None:
        buffer = self.hold(unit)
        self.gather_buffer()  # kept until the next one has been filled
        self.gather_buffer, unit.gathered = buffer, self.hold(unit)

    def prefetch(self, unit: Unit) -> None:
        unit.prefetched = self.hold(unit)

    def gather_in_backward(self, unit: Unit) -> None:
        buffer = unit.prefetched or self.hold(unit)
        unit.gathered, unit.prefetched = self.hold(unit), None
        buffer()

    def reduce(self, unit: Unit) -> None:
        """Reduce-scatter the gradients of an FSDP unit, once all have come."""
        self.reduce_buffer()
        self.reduce_buffer = self.ledger.hold(sum(p.nbytes for p in unit.ready), "communication", unit.path)
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)
        for p in unit.ready:
            shard = self.shards[id(p)]
            shard.backward(torch.empty_like(shard))
        unit.ready = []

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if unit.gathered is None:
            self.gather_in_forward(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if not unit.in_backward:  # after a recompute, the backward pass needs the weights
            unit.reshard()
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if outputs:
            self._append(unit)
        for t in outputs:
            t.register_hook(partial(self._begin_backward, unit))

    def _append(self, unit: Unit) -> None:
        self.order = [*(u for u in self.order if u is not unit), unit]
        unit.waiting, unit.ready = sum(p.requires_grad for p in unit.weights), []

    def _begin_backward(self, unit: Unit, gradient: Tensor | None = None) -> None:
        unit.in_backward = True
        if unit.gathered is None:
            self.gather_in_backward(unit)
        before = self.order[: next((i for i, u in enumerate(self.order) if u is unit), 0)]
        if before and before[-1].gathered is None and before[-1].prefetched is None:
            self.prefetch(before[-1])

    def _after_gradient(self, unit: Unit, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        unit.ready.append(weight)
        unit.waiting -= 1
        if unit.waiting <= 0:
            unit.reshard()
            unit.in_backward = False
            self.reduce(unit)


class FSDP(FSDP2):
    """Allocates what ``FullyShardedDataParallel`` allocates: one flat tensor for each FSDP unit.

    The order is that of torch/distributed/fsdp/_runtime_utils.py.
    """

    def gather_in_forward(self, unit: Unit) -> None:
        unit.gathered = self.hold(unit)

    def gather_in_backward(self, unit: Unit) -> None:
        unit.gathered, unit.prefetched = unit.prefetched or self.hold(unit), None

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.reduce_buffer()
