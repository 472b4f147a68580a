"""What each engine holds beside the model, of one rank: shards in the place of weights, gathered weights, and its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled._find import find_blocks, walk
from lt_tiled.planner.ledger import Ledger
from lt_tiled.tiling.modules import tile_marks

EngineName = Literal["single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"]
Release = Callable[[], None]


@dataclass(frozen=True)
class Engine:
    """An engine, and over how many ranks it works."""

    name: EngineName = "single"
    ranks: int = 1
    bucket: int = 0
    """DeepSpeed's ``reduce_bucket_size``, in entries: it keeps a buffer of that size."""
    buckets: int = 1
    """How many of them."""
    views: bool = False
    """DDP's ``gradient_as_bucket_view``."""
    offload_optimizer: bool = False
    """Whether DeepSpeed keeps optimizer state in RAM."""
    offload_weights: bool = False
    """Whether ZeRO-3 keeps the shards in RAM."""

    live: int = 0
    """Entries of weights that ZeRO-3 keeps gathered: the smaller of ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``."""

    @contextmanager
    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> Iterator[Held]:
        """Book what the engine holds while the step runs, and let the optimizer step on shards where there are some."""
        with ExitStack() as stack:
            held: Held = Held()
            if self.name == "ddp" and not self.views:
                trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
                stack.callback(ledger.hold(trained, "communication"))
            elif self.name in ("fsdp", "fsdp2", "zero3"):
                kind = {"fsdp": _FSDP, "fsdp2": _FSDP2, "zero3": _Zero3}[self.name]
                held = stack.enter_context(kind(self, model, optimizer, ledger).applied())
            elif self.name in ("zero1", "zero2"):
                held = stack.enter_context(_Zero(self, model, optimizer, ledger).applied())
            yield held


class Held:
    """What an engine holds, which may depend on the phase."""

    def begin(self, phase: str) -> None:
        """The forward, the backward or the optimizer's step begins."""

    def stepped(self) -> None:
        """The optimizer's step is done."""


SINGLE = Engine()


def engine_of(strategy: Any, ranks: int) -> Engine:
    """The engine of a strategy, by its class: Lightning's own, and those of this package."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if "DeepSpeedStrategy" in names:
        zero = strategy.config.get("zero_optimization", {})
        stage: Any = f"zero{zero.get('stage', 0)}"
        if stage == "zero0":
            return Engine("ddp", ranks)
        buckets = 2 if zero.get("overlap_comm", False) and stage != "zero3" else 1
        offload = [str(zero.get(f"offload_{what}", {}).get("device", "none")) != "none" for what in ("optimizer", "param")]
        live = min(int(zero.get(f"stage3_max_{what}", 1e9)) for what in ("live_parameters", "reuse_distance"))
        return Engine(
            name=stage,
            ranks=ranks,
            bucket=int(zero.get("reduce_bucket_size", 5e8)),
            buckets=buckets,
            offload_optimizer=offload[0],
            offload_weights=offload[1],
            live=live if stage == "zero3" else 0,
        )
    if "FSDPStrategy" in names:
        return Engine("fsdp", ranks)
    if "ModelParallelStrategy" in names:
        return Engine("fsdp2", ranks)
    if "DDPStrategy" in names:
        return Engine("ddp", ranks, views=bool(getattr(strategy, "_ddp_kwargs", {}).get("gradient_as_bucket_view", False)))
    return Engine("ddp" if ranks > 1 else "single", ranks)


# Units


@dataclass
class _Unit:
    """Weights that are gathered together."""

    path: str
    module: nn.Module
    weights: list[nn.Parameter]
    gathered: Release | None = None
    in_backward: bool = False
    waiting: int = 0
    """Gradients that have not come yet."""
    prefetched: Release | None = None
    ready: list[nn.Parameter] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.weights)


class _FSDP2(Held):
    """Weights that are on a rank in shards, and whole while their unit runs.

    What ``fully_shard`` allocates, in the order of its code (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        self.engine, self.model, self.optimizer, self.ledger = engine, model, optimizer, ledger
        self.units = self.find_units()
        self.shards: dict[int, nn.Parameter] = {}
        self.order: list[_Unit] = []
        self.last_gather: Release | None = None
        self.last_reduce: Release | None = None

    def find_units(self) -> list[_Unit]:
        """Those further in first, and last the one around them."""
        return _units(self.model)

    @contextmanager
    def applied(self) -> Iterator[Held]:
        with ExitStack() as stack:
            for unit in self.units:
                for weight in unit.weights:
                    self.ledger.drop(weight)
                    self.shards[id(weight)] = self.shard(weight)
                    if weight.requires_grad:
                        stack.callback(weight.register_post_accumulate_grad_hook(self._arrived(unit)).remove)
                for handle in (
                    unit.module.register_forward_pre_hook(self._before(unit)),
                    unit.module.register_forward_hook(self._after(unit), always_call=True),
                ):
                    stack.callback(handle.remove)
            for group in self.optimizer.param_groups:
                group["params"] = [self.shards[id(p)] for p in group["params"]]
            yield self

    def shard(self, weight: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps on."""
        rows = weight.shape[0] if weight.dim() else 1
        shape = (-(-rows // self.engine.ranks), *weight.shape[1:])
        shard = nn.Parameter(torch.empty(shape, dtype=weight.dtype), weight.requires_grad)
        self.ledger.name(shard, "weights")
        return shard

    def begin(self, phase: str) -> None:
        self._free("last_gather")
        self._free("last_reduce")

    def _free(self, name: str, instead: Release | None = None) -> None:
        if (release := getattr(self, name)) is not None:
            release()
        setattr(self, name, instead)

    def gather_in_forward(self, unit: _Unit) -> None:
        buffer = self.ledger.hold(unit.nbytes, "gathered", unit.path)
        self._free("last_gather", buffer)  # kept until the next unit's has been copied out
        unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    def prefetch(self, unit: _Unit) -> None:
        unit.prefetched = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    def gather_in_backward(self, unit: _Unit) -> None:
        if unit.prefetched is None:
            self.prefetch(unit)
        assert unit.prefetched is not None
        unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)
        unit.prefetched()
        unit.prefetched = None

    def reduce(self, unit: _Unit) -> None:
        """All gradients of a unit are there: scatter them, and leave those of the shards."""
        self._free("last_reduce")
        self.last_reduce = self.ledger.hold(sum(p.nbytes for p in unit.ready), "communication", unit.path)
        self.scatter(unit)

    def scatter(self, unit: _Unit) -> None:
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)
        for p in unit.ready:
            shard = self.shards[id(p)]
            shard.backward(torch.empty_like(shard))
        unit.ready = []

    def _before(self, unit: _Unit) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if unit.gathered is None:
                self.gather_in_forward(unit)

        return before

    def _after(self, unit: _Unit) -> Callable[..., None]:
        root = unit is self.units[-1]

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if unit.gathered is not None and not root and not unit.in_backward:  # a recompute leaves it to the backward
                unit.gathered()
                unit.gathered = None
            if root:
                self._free("last_gather")
            outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            if outputs:
                self.order = [*(u for u in self.order if u is not unit), unit]
                unit.waiting, unit.ready = sum(p.requires_grad for p in unit.weights), []
                for t in outputs:
                    t.register_hook(self._begin_backward(unit))

        return after

    def _begin_backward(self, unit: _Unit) -> Callable[[Tensor], None]:
        def begin(gradient: Tensor) -> None:
            unit.in_backward = True
            if unit.gathered is None:
                self.gather_in_backward(unit)
            index = next((i for i, u in enumerate(self.order) if u is unit), 0)
            if index and self.order[index - 1].gathered is None and self.order[index - 1].prefetched is None:
                self.prefetch(self.order[index - 1])

        return begin

    def _arrived(self, unit: _Unit) -> Callable[[Tensor], None]:
        def arrived(weight: Tensor) -> None:
            assert isinstance(weight, nn.Parameter)
            unit.ready.append(weight)
            unit.waiting -= 1
            if unit.waiting > 0:
                return
            if unit.gathered is not None:
                unit.gathered()
                unit.gathered = None
            unit.in_backward = False
            self.reduce(unit)

        return arrived


class _FSDP(_FSDP2):
    """What ``FullyShardedDataParallel`` allocates (torch/distributed/fsdp/_runtime_utils.py): one flat tensor for each unit."""

    def gather_in_forward(self, unit: _Unit) -> None:
        unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    def gather_in_backward(self, unit: _Unit) -> None:
        unit.gathered = unit.prefetched or self.ledger.hold(unit.nbytes, "gathered", unit.path)
        unit.prefetched = None

    def reduce(self, unit: _Unit) -> None:
        flat = self.ledger.hold(sum(p.nbytes for p in unit.ready), "communication", unit.path)
        self.scatter(unit)
        flat()


# DeepSpeed


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
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                master.backward(torch.empty_like(master))

    def offload(self) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and self.engine.offload_optimizer:
                    self.ledger.drop(value)


class _Zero3(_FSDP2):
    """What ZeRO-3 allocates (deepspeed/runtime/zero/stage3.py): each module with weights is gathered by itself, a leaf as a whole."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.masters = _Masters(engine, ledger, optimizer)

    def find_units(self) -> list[_Unit]:
        leaves = [(path, m) for path, m, _ in tile_marks(self.model)]
        inside = {id(part) for _, leaf in leaves for part in leaf.modules()}
        alone = [(path, m) for path, m in walk(self.model) if id(m) not in inside and m._parameters]
        return [_Unit(path, m, list(m.parameters())) for path, m in [*leaves, *alone]] + [_Unit("", self.model, [])]

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

    def gather_in_forward(self, unit: _Unit) -> None:
        if not self.engine.live:
            unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    gather_in_backward = gather_in_forward

    def prefetch(self, unit: _Unit) -> None:
        """No further than the bucket for it."""

    def reduce(self, unit: _Unit) -> None:
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)  # moved to the bucket
        unit.ready = []


class _Zero(Held):
    """What ZeRO-1 and 2 allocate (deepspeed/runtime/zero/stage_1_and_2.py): buckets in the backward, and optimizer state in parts."""

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
            copies = {id(p): self.masters.copy_of(p) for group in self.optimizer.param_groups for p in group["params"]}
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


# Units


def _units(model: nn.Module) -> list[_Unit]:
    """Each block, and the rest; the rest's module is the one that is called around the blocks."""
    blocks = find_blocks(model)
    units = [_Unit(path, m, []) for path, m in blocks]
    taken: set[int] = set()
    for unit in units:
        unit.weights = [p for p in unit.module.parameters() if id(p) not in taken]
        taken.update(map(id, unit.weights))
    rest = [p for p in model.parameters() if id(p) not in taken]
    around = next((m for m in model.children() if blocks and any(m is not b and _holds(m, b) for _, b in blocks)), model)
    return [*units, _Unit("", around, rest)]


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(m is part for m in module.modules())
