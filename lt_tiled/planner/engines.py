"""The engine of a strategy, and what it allocates on one rank: shards, gathered weights, buckets, float32 copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled.modules.find import find_blocks, walk
from lt_tiled.planner.ledger import Ledger
from lt_tiled.tiling.patched import whole_modules
from lt_tiled.training_step.step import nothing, stepped_on

Release = Callable[[], None]
EngineName = Literal["single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Engine:
    """An engine, and the number of its ranks.

    Attributes:
        strategy: The strategy of this package for the engine.
        bucket: The elements of DeepSpeed's buffers of ``reduce_bucket_size``.
        views: DDP's ``gradient_as_bucket_view``.
        offload_optimizer: Whether DeepSpeed keeps the optimizer state in CPU memory.
        offload_weights: Whether ZeRO-3 keeps the shards in CPU memory.
        mixed: Whether FSDP all-gathers 16-bit weights from float32 shards.
        live: The elements that ZeRO-3 keeps gathered, by ``stage3_max_live_parameters`` or ``_reuse_distance``.
    """

    name: EngineName = "single"
    ranks: int = 1
    strategy: str = "TiledSingleDeviceStrategy"
    bucket: int = 0
    views: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    mixed: bool = False
    live: int = 0


def engine_of(strategy: Any, ranks: int) -> Engine:
    """Return the engine of a strategy, by its class: a strategy of Lightning or of this package."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if "DeepSpeedStrategy" in names:
        zero = strategy.config.get("zero_optimization", {})
        stage: Any = f"zero{zero.get('stage', 0)}"
        if stage == "zero0":
            return Engine("ddp", ranks, "TiledDeepSpeedStrategy")
        offload = [zero.get(f"offload_{what}", {}).get("device") or "none" for what in ("optimizer", "param")]
        overlap = zero.get("overlap_comm", False) and stage != "zero3"
        live = min(int(zero.get(f"stage3_max_{what}", 1e9)) for what in ("live_parameters", "reuse_distance"))
        return Engine(
            name=stage,
            ranks=ranks,
            strategy="TiledDeepSpeedStrategy",
            bucket=int(zero.get("reduce_bucket_size", 5e8)) * (2 if overlap else 1),
            offload_optimizer=str(offload[0]) != "none",
            offload_weights=str(offload[1]) != "none",
            live=live if stage == "zero3" else 0,
        )
    if "FSDPStrategy" in names:
        return Engine("fsdp", ranks, "TiledFSDPStrategy")
    if "ModelParallelStrategy" in names:
        return Engine("fsdp2", ranks, "TiledModelParallelStrategy")
    if "DDPStrategy" in names:  # Lightning keeps DDP's arguments in a private attribute only
        views = bool(strategy._ddp_kwargs.get("gradient_as_bucket_view", False))
        return Engine("ddp", ranks, "TiledDDPStrategy", views=views)
    return Engine("ddp", ranks, "TiledDDPStrategy") if ranks > 1 else Engine()


class EngineMemory(ExitStack):
    """Records what an engine allocates on one rank, until it is closed: this base class holds DDP's gradient buckets.

    If there are shards, the optimizer steps on them.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__()
        self.engine, self.model, self.optimizer, self.ledger = engine, model, optimizer, ledger
        self.trained = [p for p in model.parameters() if p.requires_grad]
        if engine.name == "ddp" and not engine.views:
            ledger.hold(sum(p.nbytes for p in self.trained), "communication")

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
        for unit in self.fsdp_units:
            for weight in unit.weights:
                ledger.drop(weight)
                self.shards[id(weight)] = self.shard(weight)
                if weight.requires_grad:
                    self.callback(weight.register_post_accumulate_grad_hook(partial(self._after_gradient, unit)).remove)
        for unit in self.fsdp_units[:-1]:  # the root runs from the first phase to the second
            before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
            self.callback(unit.module.register_forward_pre_hook(before).remove)
            self.callback(unit.module.register_forward_hook(after, always_call=True).remove)
        for group in optimizer.param_groups:
            group["params"] = [self.shards[id(p)] for p in group["params"]]

    def find_fsdp_units(self) -> list[Unit]:
        """Return one FSDP unit for each block and, last, the root, which is the user's module."""
        found, taken = [], set[int]()
        for path, module in [*find_blocks(self.model), ("", self.model)]:
            found.append(Unit(path, module, [p for p in module.parameters() if id(p) not in taken]))
            taken.update(map(id, found[-1].weights))
        return found

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
        if outputs and not unit.waiting:  # no gradient of a weight will tell when its backward pass ends
            for t in tree_leaves(args):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(partial(self._end_backward, unit))

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

    def _end_backward(self, unit: Unit, gradient: Tensor | None = None) -> None:
        unit.reshard()
        unit.in_backward = False

    def _after_gradient(self, unit: Unit, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        unit.ready.append(weight)
        unit.waiting -= 1
        if unit.waiting <= 0:
            self._end_backward(unit)
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


class _DeepSpeed(EngineMemory):
    """Allocates float32 copies of a rank's part of the weights, on which the optimizer steps."""

    def shard(self, weight: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(torch.empty(-(-weight.numel() // self.engine.ranks)), weight.requires_grad)
        if self.engine.offload_optimizer or not weight.requires_grad:
            self.ledger.drop(master)
        else:
            self.ledger.name(master, "optimizer")
        return master

    def begin(self, phase: str) -> None:
        if phase == "optimizer" and not self.engine.offload_optimizer:
            for master in stepped_on(self.optimizer):
                master.backward(torch.empty_like(master))

    def stepped(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)


class Zero3(_DeepSpeed, FSDP2):
    """Allocates what ZeRO-3 allocates: each module's own weights are gathered alone, those of a leaf together.

    The order is that of deepspeed/runtime/zero/stage3.py.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        weights = list(model.parameters())
        ledger.hold(min(engine.live, sum(p.numel() for p in weights)) * weights[0].itemsize, "gathered")
        if not engine.offload_weights:
            ledger.hold(sum(-(-p.numel() // engine.ranks) * p.itemsize for p in weights), "weights")
        if not engine.offload_optimizer:
            ledger.hold(sum(-(-p.numel() // engine.ranks) * p.itemsize for p in self.trained), "gradients")
        if self.trained:
            ledger.hold(engine.bucket * self.trained[0].itemsize, "communication")

    def find_fsdp_units(self) -> list[Unit]:
        leaves = whole_modules(self.model)
        inside = {id(part) for _, leaf in leaves for part in leaf.modules()}
        alone = [(path, m) for path, m in walk(self.model) if id(m) not in inside and [*m.parameters(recurse=False)]]
        root = Unit("", self.model, [*self.model.parameters(recurse=False)])
        return [Unit(path, m, list(m.parameters())) for path, m in [*leaves, *alone]] + [root]

    def gather_in_forward(self, unit: Unit) -> None:
        if not self.engine.live:
            unit.gathered = self.hold(unit)

    gather_in_backward = gather_in_forward

    prefetch = nothing  # prefetched weights are part of the live ones

    def reduce(self, unit: Unit) -> None:
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)  # moved to the bucket
        unit.ready = []


class Zero(_DeepSpeed):
    """Allocates what ZeRO-1 and ZeRO-2 allocate: buckets in the backward pass, and a part of the optimizer state.

    The order is that of deepspeed/runtime/zero/stage_1_and_2.py.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.held = ExitStack()
        """What the backward pass allocates."""
        if engine.name == "zero2":
            for weight in self.trained:
                self.callback(weight.register_post_accumulate_grad_hook(self._after_gradient).remove)
        for group in optimizer.param_groups:
            group["params"] = [self.shard(p) for p in group["params"]]

    def begin(self, phase: str) -> None:
        if phase == "backward" and self.trained:
            self.held.callback(self.ledger.hold(self.engine.bucket * self.trained[0].itemsize, "communication"))
        if phase == "optimizer":
            self.held.close()
        super().begin(phase)

    def _after_gradient(self, weight: Tensor) -> None:
        nn.ParameterList([weight]).zero_grad(set_to_none=True)
        if not self.engine.offload_optimizer:
            self.held.callback(self.ledger.hold(-(-weight.nbytes // self.engine.ranks), "gradients"))


MEMORY: dict[EngineName, type[EngineMemory]] = {
    **{"single": EngineMemory, "ddp": EngineMemory, "fsdp": FSDP, "fsdp2": FSDP2},
    **{"zero1": Zero, "zero2": Zero, "zero3": Zero3},
}
"""What records the memory of each engine."""
