"""The engine of a strategy, and what it allocates on one rank: shards, gathered weights, buckets, float32 copies.

``docs/plan.md`` lists what a prediction leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lt_tiled.modules.blocks import find_blocks
from lt_tiled.namespaces import is_a
from lt_tiled.offload.tensors import storage_key
from lt_tiled.planner.fake import FakeLedger
from lt_tiled.planner.ledger import Allocation
from lt_tiled.tiling.patch import whole_modules
from lt_tiled.training_step.step import stepped_on


@dataclass(frozen=True)
class Engine:
    """An engine, and the number of its ranks."""

    name: str = "single"  # or "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"
    ranks: int = 1
    views: bool = False  # DDP's gradient_as_bucket_view
    mixed: torch.dtype | None = None  # in which FSDP all-gathers float32 shards, if it is another one
    zero: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's zero_optimization

    @property
    def stage(self) -> int:
        """The stage of ZeRO, or 0 for other engines."""
        return int(self.name.partition("zero")[2] or 0)

    def offloads(self, state: Literal["optimizer", "param"]) -> bool:
        """Return whether DeepSpeed keeps the optimizer state, or ZeRO-3 the shards of weights, in CPU memory."""
        return bool(self.zero.get(f"offload_{state}", {}).get("device", "none") != "none")


def engine_of(strategy: Any, ranks: int, autocast: torch.dtype | None) -> Engine:
    """Return the engine of a strategy, of Lightning or of this package, for mixed precision in a dtype."""
    if is_a(strategy, "FSDPStrategy"):
        return Engine("fsdp", ranks, mixed=autocast)
    if is_a(strategy, "ModelParallelStrategy"):
        return Engine("fsdp2", ranks)
    if is_a(strategy, "DeepSpeedStrategy"):  # which is DDP's, too
        zero = strategy.config.get("zero_optimization", {})
        if zero.get("stage", 0):
            return Engine(f"zero{zero['stage']}", ranks, zero=zero)
    elif is_a(strategy, "DDPStrategy"):  # Lightning keeps DDP's arguments in a private attribute only
        return Engine("ddp", ranks, views=bool(strategy._ddp_kwargs.get("gradient_as_bucket_view", False)))
    return Engine("ddp" if ranks > 1 else "single", ranks)


def mesh_of(engine: Engine, stack: ExitStack) -> DeviceMesh | None:
    """Return the device mesh of FSDP, on a process group that communicates nothing. Its tensors are real."""
    if not engine.name.startswith("fsdp"):
        return None
    dist.init_process_group("fake", rank=0, world_size=engine.ranks)
    stack.callback(dist.destroy_process_group)
    return init_device_mesh("cpu", (engine.ranks,))


def share_weights(engine: Engine, model: nn.Module, ledger: FakeLedger, mesh: DeviceMesh | None) -> None:
    """Record DDP's gradient buckets, or shard the weights of a model by torch's ``fully_shard``.

    FSDP2 is ``fully_shard``. ``FullyShardedDataParallel`` gathers in the same order, and needs a little less, because
    it gathers into the weights themselves.
    """
    if engine.name == "ddp" and not engine.views:
        ledger.allocate(sum(weight.nbytes for weight in trained_weights(model)), "communication")
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=engine.mixed)
        for _, block in find_blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "training_step")
        ledger.name(list(model.parameters()), "weights")


def phases(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: FakeLedger) -> Iterator[None]:
    """Enter the forward, the backward and the optimizer phase of each step, one with each ``next``.

    It records what DeepSpeed allocates, by closed formulas. The optimizer steps on float32 copies of a rank's part of
    the weights. ZeRO-1 and ZeRO-2 have a bucket in the backward pass, ZeRO-3 always. Gradients leave the weights of
    ZeRO-2 and ZeRO-3 as soon as they are summed.
    """
    bucket = int(engine.zero.get("reduce_bucket_size", 5e8)) * next(model.parameters()).itemsize
    if engine.stage < 3 and engine.zero.get("overlap_comm", False):
        bucket *= 2  # one is filled while the other is reduced
    until_step = list[Allocation]()  # from the backward pass to the optimizer's step

    def reduce(weight: Tensor) -> None:
        """Move the gradient of a weight to the bucket."""
        weight.grad = None
        if engine.stage == 2 and not engine.offloads("optimizer"):
            until_step.append(ledger.allocate(_part([weight], engine), "gradients"))

    # 1. What exists before the first step.
    if engine.stage > 1:
        for weight in trained_weights(model):
            weight.register_post_accumulate_grad_hook(reduce)
    if engine.stage == 3:
        _shard_weights(engine, model, ledger)
        ledger.allocate(bucket, "communication")
    has_masters = engine.stage > 0 and not engine.offloads("optimizer")
    if has_masters:
        for group in optimizer.param_groups:
            masters = list[nn.Parameter]()
            for weight in group["params"]:
                if weight.requires_grad:
                    masters.append(nn.Parameter(torch.empty(-(-weight.numel() // engine.ranks))))
            ledger.name(masters, "optimizer")
            group["params"] = masters
    while True:
        # 2. DeepSpeed has freed the gradients after the last step.
        if engine.stage:
            optimizer.zero_grad()
            model.zero_grad()
        ledger.begin("forward")
        yield
        # 3. The bucket of ZeRO-1 and ZeRO-2, until the gradients are those of the copies.
        if engine.stage in (1, 2):
            until_step.append(ledger.allocate(bucket, "communication"))
        ledger.begin("backward")
        yield
        while until_step:
            ledger.release(until_step.pop())
        if has_masters:
            for master in stepped_on(optimizer):
                master.grad = torch.empty_like(master)
                ledger.name(master.grad, "gradients")
        ledger.begin("optimizer")
        yield


def _part(weights: Iterable[Tensor], engine: Engine) -> int:
    """Return the bytes of a rank's part of weights."""
    return sum(-(-weight.numel() // engine.ranks) * weight.itemsize for weight in weights)


def _shard_weights(engine: Engine, model: nn.Module, ledger: FakeLedger) -> None:
    """Record the shards of ZeRO-3, their gradients, and what is gathered."""
    weights = list(model.parameters())
    # 1. What is gathered: as much as is allowed, and at least the weights of any one module.
    live = int(engine.zero.get("stage3_max_live_parameters", 1e9))
    reused = int(engine.zero.get("stage3_max_reuse_distance", 1e9))
    gathered = min(live, reused, elements(weights))
    for _, leaf in whole_modules(model):
        gathered = max(gathered, elements(leaf.parameters()))
    for module in model.modules():
        gathered = max(gathered, elements(module.parameters(recurse=False)))
    ledger.allocate(gathered * weights[0].itemsize, "gathered")
    # 2. The rank's part of weights and gradients, in place of the weights.
    if not engine.offloads("param"):
        ledger.allocate(_part(weights, engine), "weights")
    if not engine.offloads("optimizer"):
        ledger.allocate(_part(trained_weights(model), engine), "gradients")
    for weight in weights:
        ledger.forget(storage_key(weight))  # what it simulates is not on the device


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that get gradients."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def elements(weights: Iterable[Tensor]) -> int:
    """Return the number of elements of weights together."""
    return sum(weight.numel() for weight in weights)
