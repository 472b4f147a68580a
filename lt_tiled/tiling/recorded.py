"""Hugging Face records router logits with hooks inside mixture-of-experts blocks, which would see tiles.

transformers/utils/output_capturing.py: a forward hook on the router appends its output to the collector of the model's current call,
with ``output_router_logits=True`` for one. It would append one entry for each tile, without a graph.
"""

from __future__ import annotations

import inspect
import sys

from torch import nn

from lt_tiled._log import warn
from lt_tiled.tiling.call import TileMark


def records_inside(module: nn.Module, mark: TileMark) -> bool:
    """Whether an output inside the module is being recorded; if so the module runs whole from now on, and it is said.

    From now on, because a recompute in the backward, which records nothing, must take the forward's way.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = capturing._active_collector.get() if capturing is not None and hasattr(capturing, "_active_collector") else None
    if not collector:
        return False
    hooks = [hook for part in module.modules() if part is not module for hook in part._forward_hooks.values()]
    keys = {str(inspect.getclosurevars(h).nonlocals.get("key")) for h in hooks if getattr(h, "__name__", "") == "output_capturing_hook"}
    mark.whole = not keys.isdisjoint(collector)
    if mark.whole:
        warn(
            f"{mark.name} runs whole: transformers records {', '.join(sorted(keys & set(collector)))} inside it, which tiles would change."
        )
    return mark.whole
