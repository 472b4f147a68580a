"""Hugging Face records router logits with hooks inside mixture-of-experts blocks, which would see tiles.

transformers/utils/output_capturing.py: a forward hook on the router appends its output to the collector of the model's
current call, with ``output_router_logits=True`` for one. It would append one entry for each tile, without a graph.
"""

from __future__ import annotations

import inspect
import sys

from lt_tiled.errors import NotPositionWiseError
from lt_tiled.tiling.tiled_call import TiledCall


class Recorded(NotPositionWiseError):
    """An output inside the module is being recorded."""


def refuse_recorded(call: TiledCall) -> None:
    """Raise if an output inside the module is being recorded.

    Raises:
        Recorded: With its name.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = (
        capturing._active_collector.get() if capturing is not None and hasattr(capturing, "_active_collector") else None
    )
    if not collector:
        return
    hooks = [
        hook for part in call.work.parts() if part not in call.work.modules for hook in part._forward_hooks.values()
    ]
    keys = {
        str(inspect.getclosurevars(h).nonlocals.get("key"))
        for h in hooks
        if getattr(h, "__name__", "") == "output_capturing_hook"
    }
    if recorded := keys & set(collector):
        raise Recorded(
            f"{call.mark.name}: transformers records {', '.join(sorted(recorded))} inside it, which tiles would change."
        )
