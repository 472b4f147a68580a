"""What FSDP and FSDP2 hold beside the model, of one rank: shards in the place of weights, and the gathered weights of a
unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lt_tiled.modules.find import find_blocks
from lt_tiled.planner.engines import Engine
from lt_tiled.planner.ledger import Ledger

Release = Callable[[], None]


def stepped_on(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All that an optimizer steps on."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


class Held:
    """What an engine holds, which may depend on the phase."""

    def begin(self, phase: str) -> None:
        """The forward, the backward or the optimizer's step begins."""

    def stepped(self) -> None:
        """The optimizer's step is done."""


@dataclass
class Unit:
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


class FSDP2(Held):
    """Weights that are on a rank in shards, and whole while their unit runs.

    What ``fully_shard`` allocates, in the order of its code (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """

    shard_dtype: torch.dtype | None = None
    """Where it is another than that of the gathered weights."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        self.engine, self.model, self.optimizer, self.ledger = engine, model, optimizer, ledger
        self.units = self.find_units()
        self.shards: dict[int, nn.Parameter] = {}
        self.order: list[Unit] = []
        self.last_gather: Release | None = None
        self.last_reduce: Release | None = None

    def find_units(self) -> list[Unit]:
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
        shard = nn.Parameter(torch.empty(shape, dtype=self.shard_dtype or weight.dtype), weight.requires_grad)
        self.ledger.name(shard, "weights")
        return shard

    def begin(self, phase: str) -> None:
        self._free("last_gather")
        self._free("last_reduce")

    def _free(self, name: str, instead: Release | None = None) -> None:
        if (release := getattr(self, name)) is not None:
            release()
        setattr(self, name, instead)

    def gather_in_forward(self, unit: Unit) -> None:
        buffer = self.ledger.hold(unit.nbytes, "gathered", unit.path)
        self._free("last_gather", buffer)  # kept until the next unit's has been copied out
        unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    def prefetch(self, unit: Unit) -> None:
        unit.prefetched = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    def gather_in_backward(self, unit: Unit) -> None:
        if unit.prefetched is None:
            self.prefetch(unit)
        assert unit.prefetched is not None
        unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)
        unit.prefetched()
        unit.prefetched = None

    def reduce(self, unit: Unit) -> None:
        """All gradients of a unit are there: scatter them, and leave those of the shards."""
        self._free("last_reduce")
        self.last_reduce = self.ledger.hold(sum(p.nbytes for p in unit.ready), "communication", unit.path)
        self.scatter(unit)

    def scatter(self, unit: Unit) -> None:
        nn.ParameterList(unit.ready).zero_grad(set_to_none=True)
        for p in unit.ready:
            shard = self.shards[id(p)]
            shard.backward(torch.empty_like(shard))
        unit.ready = []

    def _before(self, unit: Unit) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if unit.gathered is None:
                self.gather_in_forward(unit)

        return before

    def _after(self, unit: Unit) -> Callable[..., None]:
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

    def _begin_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        def begin(gradient: Tensor) -> None:
            unit.in_backward = True
            if unit.gathered is None:
                self.gather_in_backward(unit)
            index = next((i for i, u in enumerate(self.order) if u is unit), 0)
            if index and self.order[index - 1].gathered is None and self.order[index - 1].prefetched is None:
                self.prefetch(self.order[index - 1])

        return begin

    def _arrived(self, unit: Unit) -> Callable[[Tensor], None]:
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


class FSDP(FSDP2):
    """What ``FullyShardedDataParallel`` allocates (torch/distributed/fsdp/_runtime_utils.py): one flat tensor for each
    unit.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        super().__init__(engine, model, optimizer, ledger)
        self.shard_dtype = torch.float32 if engine.mixed else None

    def gather_in_forward(self, unit: Unit) -> None:
        unit.gathered = self.ledger.hold(unit.nbytes, "gathered", unit.path)

    def gather_in_backward(self, unit: Unit) -> None:
        unit.gathered = unit.prefetched or self.ledger.hold(unit.nbytes, "gathered", unit.path)
        unit.prefetched = None

    def reduce(self, unit: Unit) -> None:
        flat = self.ledger.hold(sum(p.nbytes for p in unit.ready), "communication", unit.path)
        self.scatter(unit)
        flat()


def _units(model: nn.Module) -> list[Unit]:
    """Each block, and the rest; the rest's module is the one that is called around the blocks."""
    blocks = find_blocks(model)
    units = [Unit(path, m, []) for path, m in blocks]
    taken: set[int] = set()
    for unit in units:
        unit.weights = [p for p in unit.module.parameters() if id(p) not in taken]
        taken.update(map(id, unit.weights))
    rest = [p for p in model.parameters() if id(p) not in taken]
    around = next(
        (m for m in model.children() if blocks and any(m is not b and _holds(m, b) for _, b in blocks)), model
    )
    return [*units, Unit("", around, rest)]


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(m is part for m in module.modules())
