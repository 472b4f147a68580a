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


_ZERO_2 = {"stage": 2, "offload_optimizer": True}
_ZERO_3 = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
_NVME = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
NAMES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "tiled": ("TiledSingleDeviceStrategy", {}),
    "tiled_ddp": ("TiledDDPStrategy", {}),
    "tiled_fsdp": ("TiledFSDPStrategy", {}),
    "tiled_fsdp_cpu_offload": ("TiledFSDPStrategy", {"cpu_offload": True}),
    "tiled_fsdp2": ("TiledModelParallelStrategy", {}),
    "tiled_deepspeed": ("TiledDeepSpeedStrategy", {}),
    "tiled_deepspeed_stage_1": ("TiledDeepSpeedStrategy", {"stage": 1}),
    "tiled_deepspeed_stage_2": ("TiledDeepSpeedStrategy", {"stage": 2}),
    "tiled_deepspeed_stage_3": ("TiledDeepSpeedStrategy", {"stage": 3}),
    "tiled_deepspeed_stage_2_offload": ("TiledDeepSpeedStrategy", _ZERO_2),
    "tiled_deepspeed_stage_3_offload": ("TiledDeepSpeedStrategy", _ZERO_3),
    "tiled_deepspeed_stage_3_offload_nvme": ("TiledDeepSpeedStrategy", _ZERO_3 | _NVME),
}
"""For each registered name the class, and the arguments that it is made with."""


def register(registry: Any, strategies: Mapping[str, Any]) -> None:
    """Make the names known to the Trainer or Fabric that a registry of Lightning belongs to."""
    for name, (strategy, arguments) in NAMES.items():
        registry.register(name, strategies[strategy], override=True, **arguments)  # modules may be reloaded


def is_a(value: Any, name: str) -> bool:
    """Return whether a value is an instance of Lightning's class of that name, in whichever package."""
    return any(kind.__name__ == name and kind.__module__.startswith(LIGHTNING) for kind in type(value).__mro__)
