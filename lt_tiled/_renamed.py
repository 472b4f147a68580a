"""Old names and import paths, which work for one more release with a ``DeprecationWarning``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "lt_tiled.callbacks.memory_monitor": "lt_tiled.callbacks.measuring",
    "lt_tiled.callbacks.offloaded_checkpointing": "lt_tiled.callbacks.preparing",
    "lt_tiled.callbacks.report": "lt_tiled.callbacks.measuring",
    "lt_tiled.callbacks.tiled_mlp": "lt_tiled.callbacks.preparing",
    "lt_tiled.offload.build": "lt_tiled.offload.offloader",
    "lt_tiled.offload.errors": "lt_tiled.errors",
    "lt_tiled.offload.hooks": "lt_tiled.offload.offloader",
    "lt_tiled.planner.flops": "lt_tiled.planner.ledger",
    "lt_tiled.planner.plan": "lt_tiled.planner.search",
    "lt_tiled.strategies.model_parallel": "lt_tiled.strategies.fsdp2",
    "lt_tiled.tiling.call": "lt_tiled.tiling.tiled_call",
    "lt_tiled.tiling.check": "lt_tiled.tiling.self_check",
    "lt_tiled.tiling.cross_entropy": "lt_tiled.loss.cross_entropy",
    "lt_tiled.tiling.find": "lt_tiled.modules.feed_forward",
    "lt_tiled.tiling.function": "lt_tiled.tiling.autograd",
    "lt_tiled.tiling.loss": "lt_tiled.loss.functional",
    "lt_tiled.tiling.model_loss": "lt_tiled.loss.transformers",
    "lt_tiled.tiling.modules": "lt_tiled.tiling.api",
    "lt_tiled.tiling.work": "lt_tiled.errors",
}


class _RenamedModules(MetaPathFinder, Loader):
    """Imports the new module under an old path. It runs after all other finders, so only for paths that are gone."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        warn_renamed(module.__name__, MODULES[module.__name__])
        sys.modules[module.__name__] = import_module(MODULES[module.__name__])  # which importlib returns


sys.meta_path.append(_RenamedModules())


def deprecated(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module`` that maps old names to full new names and warns when one is used."""

    def __getattr__(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", renamed[name])
        path, _, new = renamed[name].rpartition(".")
        return getattr(import_module(path), new)

    return __getattr__


def warn_renamed(old: str, new: str) -> None:
    """Warn that ``old`` has the name ``new`` now."""
    warnings.warn(f"{old} is now {new}; the old name will go in 0.3.0.", DeprecationWarning, stacklevel=3)
