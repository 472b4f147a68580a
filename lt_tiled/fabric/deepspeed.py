"""DeepSpeed ZeRO-1, 2 and 3, for Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager

from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from typing_extensions import override

from lt_tiled.fabric._mixin import TiledStrategy
from lt_tiled.strategies._deepspeed import DeepSpeedNeeds


class TiledDeepSpeedStrategy(DeepSpeedNeeds, TiledStrategy, DeepSpeedStrategy):
    """Tiling and checkpointing under DeepSpeed, with all of :class:`DeepSpeedStrategy`'s arguments.

    Raises:
        ModuleNotFoundError: If deepspeed is not installed.
        ValueError: If ``cpu_checkpointing`` and ``checkpointing`` are both given.
    """

    guarded = DeepSpeedStrategy

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return self.sharded_context(super().module_sharded_context)
