"""What transformers records through hooks inside a tiled module, such as router logits.

Its hooks append what a module returns to the collector of the model's current call, which would be an entry for each
tile, without a graph. So tiles have a collector of their own, whose entries are outputs of the tile like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

Collector = dict[str, list[Any]]
CAPTURING = "transformers.utils.output_capturing"


def active_collector(parts: Sequence[nn.Module]) -> Collector | None:
    """Return the collector of the model's current call, if it records anything in one of these modules."""
    for part in parts:
        for hook in part._forward_hooks.values():
            if hook.__module__ == CAPTURING:
                return sys.modules[CAPTURING]._active_collector.get() or None
    return None


def run_recorded(run: Callable[..., Any], keys: Sequence[str], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Run a tile; return its output, and what was recorded in it."""
    active = sys.modules[CAPTURING]._active_collector
    own: dict[str, list[Any]] = {key: [] for key in keys}
    token = active.set(own)
    try:
        output = run(*args, **kwargs)
    finally:
        active.reset(token)
    return output, {key: found for key, found in own.items() if found}


def record(output: tuple[Any, Collector], collector: Collector) -> Any:
    """Add what was recorded in the tiles to the collector, and return the module's own output."""
    own, found = output
    for key, tensors in found.items():
        collector[key].extend(tensors)
    return own
