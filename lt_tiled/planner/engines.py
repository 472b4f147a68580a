"""The engine of a strategy, and what it allocates on one rank: shards, gathered weights, buckets, float32 copies.

``docs/plan.md`` lists what a prediction leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lt_tiled.modules.blocks import find_blocks
from lt_tiled.namespaces import is_a
from lt_tiled.planner.fake import FakeLedger
from lt_tiled.planner.ledger import Allocation
from lt_tiled.tiling.patch import whole_modules
from lt_tiled.training_step.step import stepped_on

EngineName = Literal["single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Engine:
    """An engine, and the number of its ranks."""

    name: EngineName = "single"
    ranks: int = 1
    bucket: int = 0  # elements of DeepSpeed's reduce_bucket_size
    views: bool = False  # DDP's gradient_as_bucket_view
    offload_optimizer: bool = False  # DeepSpeed keeps the optimizer state in CPU memory
    offload_weights: bool = False  # ZeRO-3 keeps the shards in CPU memory
    mixed: torch.dtype | None = None  # in which FSDP all-gathers float32 shards, if it is another one
    live: int = 0  # elements that ZeRO-3 keeps gathered: stage3_max_live_parameters or stage3_max_reuse_distance

    @property
    def stage(self) -> int:
        """The stage of ZeRO, or 0 for other engines."""
        return int(self.name[-1]) if self.name.startswith("zero") else 0


def engine_of(strategy: Any, ranks: int) -> Engine:
    """Return the engine of a strategy, of Lightning or of this package."""
    zero: dict[str, Any] = {}
    if is_a(strategy, "FSDPStrategy"):
        return Engine("fsdp", ranks)
    if is_a(strategy, "ModelParallelStrategy"):
        return Engine("fsdp2", ranks)
    if is_a(strategy, "DeepSpeedStrategy"):  # which is DDP's, too
        zero = strategy.config.get("zero_optimization", {})
    elif is_a(strategy, "DDPStrategy"):  # Lightning keeps DDP's arguments in a private attribute only
        return Engine("ddp", ranks, views=bool(strategy._ddp_kwargs.get("gradient_as_bucket_view", False)))
    if not zero.get("stage", 0):
        return Engine("ddp" if ranks > 1 else "single", ranks)
    name: Any = f"zero{zero['stage']}"
    bucket = int(zero.get("reduce_bucket_size", 5e8))
    if name != "zero3" and zero.get("overlap_comm", False):
        bucket *= 2  # one is filled while the other is reduced
    return Engine(
        name,
        ranks,
        bucket,
        offload_optimizer=zero.get("offload_optimizer", {}).get("device", "none") != "none",
        offload_weights=zero.get("offload_param", {}).get("device", "none") != "none",
        live=int(min(zero.get("stage3_max_live_parameters", 1e9), zero.get("stage3_max_reuse_distance", 1e9))),
    )


def mesh_of(engine: Engine, stack: ExitStack) -> DeviceMesh | None:
    """Return the device mesh of FSDP, on a process group that communicates nothing. Its tensors are real."""
    if not engine.name.startswith("fsdp"):
        return None
    dist.init_process_group("fake", rank=0, world_size=engine.ranks)
    stack.callback(dist.destroy_process_group)
    return init_device_mesh("cpu", (engine.ranks,))


def share_weights(engine: Engine, model: nn.Module, ledger: FakeLedger, mesh: DeviceMesh | None) -> None:
    """Record DDP's gradient buckets, or shard the weights of a model by torch's ``fully_shard``.

    FSDP2 is ``fully_shard``. ``FullyShardedDataParallel`` gathers in the same order, but without buffers.
    """
    if engine.name == "ddp" and not engine.views:
        ledger.allocate(sum(weight.nbytes for weight in trained_weights(model)), "communication")
    if mesh is not None:
        ledger.gathers_in_place = engine.name == "fsdp"
        policy = MixedPrecisionPolicy(param_dtype=engine.mixed)
        for _, block in find_blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "training_step")
        ledger.name(list(model.parameters()), "weights")


class Zero:
    """Records what DeepSpeed allocates: float32 copies of a rank's part of the weights, on which the optimizer steps.

    All sizes are closed formulas. ZeRO-1 and ZeRO-2 have a bucket in the backward pass, ZeRO-3 always. ZeRO-3 keeps
    ``live`` elements gathered, or the largest module whose weights are gathered together. Gradients leave the weights
    of ZeRO-2 and ZeRO-3 as soon as they are summed. For other engines it does nothing.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: FakeLedger) -> None:
        self.engine = engine
        self.model = model
        self.optimizer = optimizer
        self.ledger = ledger
        self.bucket = engine.bucket * next(model.parameters()).itemsize
        self.until_step: list[Allocation] = []
        """What exists from the backward pass to the optimizer's step."""
        if not engine.stage:
            return
        if engine.stage == 3:
            self._shard_weights()
        if engine.stage > 1:
            for weight in trained_weights(model):
                weight.register_post_accumulate_grad_hook(self._reduce)
        if not engine.offload_optimizer:
            for group in optimizer.param_groups:
                masters = list[nn.Parameter]()
                for weight in group["params"]:
                    if weight.requires_grad:
                        masters.append(nn.Parameter(torch.empty(-(-weight.numel() // engine.ranks))))
                ledger.name(masters, "optimizer")
                group["params"] = masters

    def _part(self, weights: Iterable[Tensor]) -> int:
        """Return the bytes of a rank's part of weights."""
        return sum(-(-p.numel() // self.engine.ranks) * p.itemsize for p in weights)

    def _shard_weights(self) -> None:
        """Record the shards of ZeRO-3, their gradients, and what is gathered."""
        weights = list(self.model.parameters())
        # 1. What is gathered: as much as is allowed, and at least the weights of any one module.
        gathered = min(self.engine.live, elements(weights))
        for _, leaf in whole_modules(self.model):
            gathered = max(gathered, elements(leaf.parameters()))
        for module in self.model.modules():
            gathered = max(gathered, elements(module.parameters(recurse=False)))
        self.ledger.allocate(gathered * weights[0].itemsize, "gathered")
        # 2. The rank's part of weights and gradients, in place of the weights.
        if not self.engine.offload_weights:
            self.ledger.allocate(self._part(weights), "weights")
        if not self.engine.offload_optimizer:
            self.ledger.allocate(self._part(trained_weights(self.model)), "gradients")
        self.ledger.allocate(self.bucket, "communication")
        for weight in weights:
            self.ledger.drop(weight)

    def _reduce(self, weight: Tensor) -> None:
        """Move the gradient of a weight to the bucket."""
        weight.grad = None
        if self.engine.stage == 2 and not self.engine.offload_optimizer:
            self.until_step.append(self.ledger.allocate(self._part([weight]), "gradients"))

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase."""
        if not self.engine.stage:
            return
        if phase == "forward":  # DeepSpeed frees the gradients after a step
            self.optimizer.zero_grad()
            self.model.zero_grad()
        elif phase == "backward" and self.engine.stage < 3:
            self.until_step.append(self.ledger.allocate(self.bucket, "communication"))
        elif phase == "optimizer":
            while self.until_step:
                self.ledger.release(self.until_step.pop())
            if not self.engine.offload_optimizer:
                for master in stepped_on(self.optimizer):
                    master.backward(torch.empty_like(master))


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that get gradients."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def elements(weights: Iterable[Tensor]) -> int:
    """Return the number of elements of weights together."""
    return sum(weight.numel() for weight in weights)
