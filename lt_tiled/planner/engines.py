"""The engine of a strategy, and what it allocates on one rank: shards, gathered weights, buckets, float32 copies.

``docs/plan.md`` lists what a prediction leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled.modules.blocks import find_blocks
from lt_tiled.namespaces import is_a
from lt_tiled.planner.ledger import Ledger
from lt_tiled.tiling.patch import whole_modules
from lt_tiled.training_step.step import nothing, stepped_on

Release = Callable[[], None]
EngineName = Literal["single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Engine:
    """An engine, and the number of its ranks.

    Attributes:
        bucket: The elements of DeepSpeed's buffers of ``reduce_bucket_size``.
        views: DDP's ``gradient_as_bucket_view``.
        offload_optimizer: Whether DeepSpeed keeps the optimizer state in CPU memory.
        offload_weights: Whether ZeRO-3 keeps the shards in CPU memory.
        mixed: Whether FSDP all-gathers 16-bit weights from float32 shards.
        live: The elements that ZeRO-3 keeps gathered, by ``stage3_max_live_parameters`` or ``_reuse_distance``.
    """

    name: EngineName = "single"
    ranks: int = 1
    bucket: int = 0
    views: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    mixed: bool = False
    live: int = 0

    @property
    def strategy(self) -> str:
        """The strategy of this package for the engine."""
        kinds = {"single": "SingleDevice", "ddp": "DDP", "fsdp": "FSDP", "fsdp2": "ModelParallel"}
        return f"Tiled{kinds.get(self.name, 'DeepSpeed')}Strategy"

    @property
    def stage(self) -> int:
        """The stage of ZeRO, or 0 for other engines."""
        return int(self.name[-1]) if self.name.startswith("zero") else 0


def engine_of(strategy: Any, ranks: int) -> Engine:
    """Return the engine of a strategy, of Lightning or of this package."""
    if is_a(strategy, "DeepSpeedStrategy"):
        return _deepspeed(strategy.config.get("zero_optimization", {}), ranks)
    if is_a(strategy, "FSDPStrategy"):
        return Engine("fsdp", ranks)
    if is_a(strategy, "ModelParallelStrategy"):
        return Engine("fsdp2", ranks)
    if is_a(strategy, "DDPStrategy"):  # Lightning keeps DDP's arguments in a private attribute only
        return Engine("ddp", ranks, views=bool(strategy._ddp_kwargs.get("gradient_as_bucket_view", False)))
    return Engine("ddp", ranks) if ranks > 1 else Engine()


def _deepspeed(zero: dict[str, Any], ranks: int) -> Engine:
    stage: Any = f"zero{zero.get('stage', 0)}"
    if stage == "zero0":
        return Engine("ddp", ranks)
    optimizer, weights = (zero.get(f"offload_{what}", {}).get("device") or "none" for what in ("optimizer", "param"))
    overlap = zero.get("overlap_comm", False) and stage != "zero3"
    live = min(int(zero.get(f"stage3_max_{what}", 1e9)) for what in ("live_parameters", "reuse_distance"))
    return Engine(
        name=stage,
        ranks=ranks,
        bucket=int(zero.get("reduce_bucket_size", 5e8)) * (2 if overlap else 1),
        offload_optimizer=str(optimizer) != "none",
        offload_weights=str(weights) != "none",
        live=live if stage == "zero3" else 0,
    )


class EngineMemory(ExitStack):
    """Records what an engine allocates on one rank, until it is closed. This base class records DDP's gradient buckets.

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

    def stepped(self) -> None: ...


@dataclass(eq=False)
class Unit:
    """An FSDP unit: weights that are all-gathered together."""

    path: str
    weights: list[nn.Parameter]
    trained: list[nn.Parameter]
    """The weights that get gradients."""
    gathered: Release | None = None


class FSDP(EngineMemory):
    """Allocates what FSDP allocates: shards, and full weights while their FSDP unit runs.

    The order is that of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. ``FullyShardedDataParallel`` gathers
    into the flat weights themselves and frees the reduced gradients at once; ``fully_shard`` needs a buffer for each.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.flat = engine.name == "fsdp"
        self.phase = "forward"
        self.shards: dict[int, nn.Parameter] = {}
        self.order: list[Unit] = []
        """The units in the order of their forward passes, which the backward pass reverses."""
        self.gather_buffer: Release = nothing
        self.reduce_buffer: Release = nothing
        for path, block in find_blocks(model):
            unit = self._add_unit(path, block)
            self.callback(block.register_forward_pre_hook(partial(self._before_forward, unit)).remove)
            after = partial(self._after_forward, unit)
            self.callback(block.register_forward_hook(after, always_call=True).remove)
        self.root = self._add_unit("", model)  # it runs from the first phase to the second
        for group in optimizer.param_groups:
            group["params"] = [self.shards[id(p)] for p in group["params"]]

    def _add_unit(self, path: str, module: nn.Module) -> Unit:
        """Shard the weights of a module that are in no other FSDP unit."""
        weights = [p for p in module.parameters() if id(p) not in self.shards]
        unit = Unit(path, weights, [p for p in weights if p.requires_grad])
        for weight in weights:
            rows = weight.shape[0] if weight.dim() else 1
            shape = (-(-rows // self.engine.ranks), *weight.shape[1:])
            dtype = torch.float32 if self.engine.mixed else weight.dtype
            shard = nn.Parameter(torch.empty(shape, dtype=dtype), weight.requires_grad)
            self.shards[id(weight)] = shard
            self.ledger.name(shard, "weights")
            self.ledger.drop(weight)
        for weight in unit.trained:
            self.callback(weight.register_post_accumulate_grad_hook(partial(self._after_gradient, unit)).remove)
        return unit

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.gather_buffer()
        self.reduce_buffer()
        if phase == "forward":
            self._before_forward(self.root)
        elif phase == "backward":
            self._append(self.root)
            self._begin_backward(self.root)

    def _hold(self, unit: Unit) -> Release:
        return self.ledger.hold(sum(p.nbytes for p in unit.weights), "gathered", unit.path)

    def _before_forward(self, unit: Unit, *_: Any) -> None:
        if unit.gathered is not None:  # in a recompute
            return
        if not self.flat:
            buffer = self._hold(unit)
            self.gather_buffer()  # kept until the next one has been filled
            self.gather_buffer = buffer
        unit.gathered = self._hold(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.phase != "forward":  # after a recompute, the backward pass needs the weights
            return
        self._reshard(unit)
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if outputs:
            self._append(unit)
        for t in outputs:
            t.register_hook(partial(self._begin_backward, unit))
        if outputs and not unit.trained:  # no gradient of a weight will tell when its backward pass ends
            for t in tree_leaves(args):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(partial(self._reshard, unit))

    def _append(self, unit: Unit) -> None:
        self.order = [*(u for u in self.order if u is not unit), unit]

    def _begin_backward(self, unit: Unit, *_: Any) -> None:
        """Gather the weights of a unit, unless the one before did, and those of the unit that follows."""
        if unit.gathered is None:
            unit.gathered = self._hold(unit)
        if not self.flat and unit is not self.root:
            self._hold(unit)()  # the all-gather's buffer, from which the weights are copied
        following = self.order[max(self.order.index(unit) - 1, 0)]
        if following.gathered is None:
            following.gathered = self._hold(following)

    def _reshard(self, unit: Unit, *_: Any) -> None:
        """Release the gathered weights."""
        if unit.gathered is not None:
            unit.gathered()
            unit.gathered = None

    def _after_gradient(self, unit: Unit, weight: Tensor) -> None:
        """Reduce-scatter the gradients of an FSDP unit, once all have come."""
        if any(p.grad is None for p in unit.trained):
            return
        self._reshard(unit)
        self.reduce_buffer()
        self.reduce_buffer = self.ledger.hold(sum(p.nbytes for p in unit.trained), "communication", unit.path)
        nn.ParameterList(unit.trained).zero_grad(set_to_none=True)
        for p in unit.trained:
            shard = self.shards[id(p)]
            shard.backward(torch.empty_like(shard))
        if self.flat:
            self.reduce_buffer()


class Zero(EngineMemory):
    """Records what DeepSpeed allocates: float32 copies of a rank's part of the weights, on which the optimizer steps.

    All sizes are closed formulas. ZeRO-1 and ZeRO-2 have a bucket in the backward pass, ZeRO-3 always. ZeRO-3 keeps
    ``live`` elements gathered, or the largest module whose weights are gathered together.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.until_step = ExitStack()
        """Releases what exists from the backward pass to the optimizer's step."""
        self.bucket = engine.bucket * self.trained[0].itemsize if self.trained else 0
        reduced_together = [[weight] for weight in self.trained] if engine.stage == 2 else []
        if engine.stage == 3:
            reduced_together = self._shard_weights()
        for weights in reduced_together:
            for weight in weights:
                self.callback(weight.register_post_accumulate_grad_hook(partial(self._reduce, weights)).remove)
        for group in optimizer.param_groups:
            group["params"] = [self._master(p) for p in group["params"]]

    def _part(self, weights: list[nn.Parameter]) -> int:
        """Return the bytes of a rank's part of weights."""
        return sum(-(-p.numel() // self.engine.ranks) * p.itemsize for p in weights)

    def _shard_weights(self) -> list[list[nn.Parameter]]:
        """Record the shards of ZeRO-3, and return the weights with gradients that are reduced together."""
        weights, leaves = list(self.model.parameters()), whole_modules(self.model)
        inside = {part for _, leaf in leaves for part in leaf.modules()}
        modules = [[*leaf.parameters()] for _, leaf in leaves]
        modules += [[*m.parameters(recurse=False)] for m in self.model.modules() if m not in inside]
        largest = max(sum(p.numel() for p in module) for module in modules)
        gathered = max(largest, min(self.engine.live, sum(p.numel() for p in weights)))
        self.ledger.hold(gathered * weights[0].itemsize, "gathered")
        if not self.engine.offload_weights:
            self.ledger.hold(self._part(weights), "weights")
        if not self.engine.offload_optimizer:
            self.ledger.hold(self._part(self.trained), "gradients")
        self.ledger.hold(self.bucket, "communication")
        for weight in weights:
            self.ledger.drop(weight)
        return [[p for p in module if p.requires_grad] for module in modules]

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(torch.empty(-(-weight.numel() // self.engine.ranks)), weight.requires_grad)
        if self.engine.offload_optimizer or not weight.requires_grad:
            self.ledger.drop(master)
        else:
            self.ledger.name(master, "optimizer")
        return master

    def begin(self, phase: str) -> None:
        if phase == "backward" and self.engine.stage < 3:
            self.until_step.callback(self.ledger.hold(self.bucket, "communication"))
        if phase == "optimizer":
            self.until_step.close()
            for master in () if self.engine.offload_optimizer else stepped_on(self.optimizer):
                master.backward(torch.empty_like(master))

    def stepped(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)

    def _reduce(self, weights: list[nn.Parameter], weight: Tensor) -> None:
        """Move the gradients of weights to the bucket, once all have come."""
        if any(p.grad is None for p in weights):
            return
        nn.ParameterList(weights).zero_grad(set_to_none=True)
        if self.engine.stage == 2 and not self.engine.offload_optimizer:
            self.until_step.callback(self.ledger.hold(self._part(weights), "gradients"))


MEMORY: dict[EngineName, type[EngineMemory]] = {
    **{"single": EngineMemory, "ddp": EngineMemory, "fsdp": FSDP, "fsdp2": FSDP},
    **{"zero1": Zero, "zero2": Zero, "zero3": Zero},
}
"""What records the memory of each engine."""
