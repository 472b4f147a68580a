"""The packages in which Lightning is published, the names of strategies in each, and questions about their objects.

NOTE [Namespaces]
``lightning.pytorch`` and ``pytorch_lightning`` have the same code but different classes. Each Trainer accepts only
strategies of its own package, and Fabric those of ``lightning.fabric``. Therefore each strategy of lt_tiled is written
once, in ``strategies/``, as a base class that inherits from no class of Lightning. Three modules, one per package,
combine these bases with Lightning's strategies: ``trainer``, ``fabric`` and ``pytorch_lightning``. They use class
statements, so that editors, pickle, ``isinstance`` and jsonargparse see ordinary classes. ``import lt_tiled`` imports
the first two alone. A callback inherits from ``lightning.pytorch.Callback``, which only has empty hooks, so the class
for ``pytorch_lightning`` inherits from both. Code that receives objects of all packages asks for their classes by name
(:func:`is_a`), not with ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIGHTNING = ("lightning.", "pytorch_lightning.")
"""The beginnings of the names of Lightning's modules."""


def register(registry: Any, strategies: Mapping[str, Any]) -> None:
    """Make the strategies known to the Trainer or Fabric that a registry of Lightning belongs to.

    Each has the names that its parent has there, with the same arguments, behind ``tiled_``.
    """
    for name in registry.available_strategies():
        known = registry[name]
        strategy = strategies.get(f"Tiled{known['strategy'].__name__}")
        if strategy is not None:
            registry.register(f"tiled_{name}", strategy, override=True, **known["init_params"])  # modules are reloaded
    # Lightning has no short name for one device, and none for FSDP2.
    registry.register("tiled", strategies["TiledSingleDeviceStrategy"], override=True)
    registry.register("tiled_fsdp2", strategies["TiledModelParallelStrategy"], override=True)


def is_a(value: Any, name: str) -> bool:
    """Return whether a value is an instance of Lightning's class of that name, in whichever package."""
    return any(kind.__name__ == name and kind.__module__.startswith(LIGHTNING) for kind in type(value).__mro__)
