"""Find the engine that wraps a prepared model, and what it needs of tiled modules.

NOTE [Finding the engine]
``prepare`` runs before an engine wraps the model, so what the engine needs is read from the model in the first call of
a tiled module. Each engine leaves its own mark: ZeRO-3 ``ds_id`` on all weights (NOTE [ZeRO-3 leaves] says what must
happen earlier), FSDP2 and FSDP the classes of their units, tensor parallelism the class of weights. DDP, ZeRO-1 and
ZeRO-2 need nothing. A model that ran before is looked at again: FSDP puts other weights in the place of its weights, of
which one is enough to see that, and ZeRO-3 marks them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lt_tiled.engines.zero import adapt_to_zero3
from lt_tiled.modules.find import unwrapped
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.call import EngineNeeds
from lt_tiled.tiling.patch import TiledPatch, tiled_patches


class Engine(EngineNeeds):
    """What the engine that wraps a model needs: see NOTE [Finding the engine]."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else lambda: None
        self.watched: tuple[Mapping[str, Any], str, Any] = ({}, "", object())
        """One of the weights, where it is, and its name there: a call looks again if there is another one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        # Nothing wraps the copy of a model yet, or another engine.
        memo[id(self)] = copy = Engine(memo.get(id(self._model())))
        return copy

    def update(self, module: nn.Module) -> None:
        holder, name, weight = self.watched
        if holder.get(name) is not weight or hasattr(weight, "ds_id"):
            self.find(module)

    def find(self, module: nn.Module) -> None:
        """Find what wraps the model of this tiled module, and raise ``ValueError`` if tiles cannot run in it."""
        model = self._model()
        model = module if model is None else model  # a compiled model has a length if what it compiles has one
        units: set[nn.Module] = set()
        for part in model.modules():
            if isinstance(part, FullyShardedDataParallel | FSDPModule):
                units.add(unwrapped(part))
        _refuse_units_inside(model, units)
        zero3 = any(hasattr(weight, "ds_id") for weight in model.parameters())
        # The weights of a norm or an MLP that is a unit are there during its call alone.
        self.pending = not any(get_patch(unit, TiledPatch) for unit in units)
        if zero3:
            self.pending = adapt_to_zero3(model)
        # These are final. Others may come after the first calls, and replace the weights.
        self.watched = ({}, "", None)
        if zero3 or units or any(isinstance(weight, DTensor) for weight in model.parameters()):
            return
        for part in module.modules():
            for name, weight in part._parameters.items():
                if weight is not None and weight.requires_grad:
                    self.watched = (part._parameters, name, weight)
                    return


def _refuse_units_inside(model: nn.Module, units: set[nn.Module]) -> None:
    for path, module, _ in tiled_patches(model) if units else ():
        for name, part in module.named_modules():
            if unwrapped(part) in units and part is not module:
                kind = type(module).__name__
                raise ValueError(
                    f"{path} ({kind}) is tiled, and {name} inside it is an FSDP unit, all-gathered for every tile. Make"
                    f" the block or the whole {kind} the unit (auto_wrap_policy={{MyBlock}}, fully_shard(block))."
                )
