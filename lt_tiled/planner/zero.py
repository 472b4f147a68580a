"""What DeepSpeed allocates on one rank: buckets, gathered weights, and float32 copies of its part of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lt_tiled._training_step import stepped_on
from lt_tiled.modules.find import walk
from lt_tiled.planner.shards import FSDP2, EngineMemory, Unit
from lt_tiled.tiling.patched import tiled_patches


class _DeepSpeed(EngineMemory):
    """Allocates float32 copies of a rank's part of the weights, on which the optimizer steps."""

    def copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(torch.empty(-(-weight.numel() // self.engine.ranks)), weight.requires_grad)
        if self.engine.offload_optimizer:
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

    shard = _DeepSpeed.copy_of

    def find_fsdp_units(self) -> list[Unit]:
        leaves = [(path, m) for path, m, _ in tiled_patches(self.model)]
        inside = {id(part) for _, leaf in leaves for part in leaf.modules()}
        alone = [(path, m) for path, m in walk(self.model) if id(m) not in inside and [*m.parameters(recurse=False)]]
        root = Unit("", self.model, [*self.model.parameters(recurse=False)])
        return [Unit(path, m, list(m.parameters())) for path, m in [*leaves, *alone]] + [root]

    @contextmanager
    def applied(self) -> Iterator[None]:
        engine, trained, weights = self.engine, self.trained, list(self.model.parameters())
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
            yield

    def gather_in_forward(self, unit: Unit) -> None:
        if not self.engine.live:
            unit.gathered = self.hold(unit)

    gather_in_backward = gather_in_forward

    def prefetch(self, unit: Unit) -> None:
        """Allocate nothing: prefetched weights are part of the live ones."""

    def reduce(self, unit: Unit) -> None:
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)  # moved to the bucket
        unit.ready = []


class Zero(_DeepSpeed):
    """Allocates what ZeRO-1 and ZeRO-2 allocate: buckets in the backward pass, and a part of the optimizer state.

    The order is that of deepspeed/runtime/zero/stage_1_and_2.py.
    """

    held: ExitStack

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack, ExitStack() as self.held:
            if self.engine.name == "zero2":
                for weight in self.trained:
                    stack.callback(weight.register_post_accumulate_grad_hook(self._after_gradient).remove)
            for group in self.optimizer.param_groups:
                group["params"] = [self.copy_of(p) for p in group["params"]]
            yield

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
