"""Find the engine that wraps a prepared model, and what it needs of tiled modules.

NOTE [Finding the engine]
``prepare`` runs before an engine wraps the model, so what the engine needs is read from the model in the first call of
a tiled module. Each engine leaves its own mark:

* ZeRO-3: ``ds_id`` on all weights. See NOTE [ZeRO-3 leaves] for what must happen earlier.
* ZeRO-1 and 2: hooks on the gradients of weights.
* FSDP2: the class ``FSDPModule``; tensor parallelism: the class ``DTensor``.
* FSDP: the class ``FullyShardedDataParallel``.
* DDP needs nothing.

A model that ran before an engine wraps it is looked at again: FSDP puts other weights in the place of its weights,
ZeRO-1 and 2 set hooks on them, and ZeRO-3 tells its leaf modules. One weight is enough to see that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lt_tiled.engines.zero import adapt_to_zero3, is_zero
from lt_tiled.modules.find import unwrapped
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patch import TiledPatch, tiled_patches
from lt_tiled.tiling.state import EngineNeeds


class Engine(EngineNeeds):
    """What the engine that wraps a model needs: see NOTE [Finding the engine]."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__(known=False)
        self._model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        # Nothing wraps the copy of a model yet, or another engine.
        model = self._model()
        memo[id(self)] = copy = Engine(memo.get(id(model)))
        return copy

    def find(self, module: nn.Module) -> None:
        """Find what wraps the model that this tiled module is a part of."""
        model = self._model()
        model = module if model is None else model  # a compiled model has a length if what it compiles has one
        weights = list(model.parameters())
        units = {unwrapped(m) for m in model.modules() if isinstance(m, FullyShardedDataParallel | FSDPModule)}
        sharded = any(isinstance(m, FSDPModule) for m in units) or any(isinstance(w, DTensor) for w in weights)
        zero3 = any(hasattr(w, "ds_id") for w in weights)
        zero = not zero3 and any(map(is_zero, weights))
        pending = _adapt_to_units(model, units)
        if zero3:
            pending = adapt_to_zero3(model) and pending
        # ZeRO reads the gradient of each weight that autograd reaches, and takes the others as zeros. FSDP2 reduces
        # only gradients that exist, and ranks whose tokens chose different experts would differ.
        self.zeros_for_unused, self.pending = zero3 or zero or sharded, pending
        self.known = zero3 or zero or sharded or bool(units)
        held = [(part._parameters, name, w) for part in module.modules() for name, w in part._parameters.items()]
        trained = ((holder, name) for holder, name, w in held if w is not None and w.requires_grad)
        self.holder, self.name = next(trained, ({}, ""))
        self.weight = self.holder.get(self.name)
        self.hooks = getattr(self.weight, "_post_accumulate_grad_hooks", None)


def _adapt_to_units(model: nn.Module, units: set[nn.Module]) -> bool:
    """Return whether norms may be pending, given the FSDP units of a model.

    If a norm or MLP is its own FSDP unit, its weights are gathered only during its call, so nothing is pending.
    """
    for path, module, _ in tiled_patches(model) if units else ():
        for name, part in module.named_modules():
            if unwrapped(part) in units and part is not module:
                kind = type(module).__name__
                raise ValueError(
                    f"{path} ({kind}) is tiled, and {name} inside it is an FSDP unit, whose weights would be"
                    f" all-gathered for every tile. Make the block or the whole {kind} the FSDP unit"
                    " (auto_wrap_policy={MyBlock}, fully_shard(block)), leave the policy out for one FSDP unit per"
                    " block, or remove the module from Tiling(targets=...)."
                )
    return not any(get_patch(unit, TiledPatch) for unit in units)
