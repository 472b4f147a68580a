"""``DistributedDataParallel``."""

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy

from lt_tiled.strategies.base import TiledFabricStrategy, TiledTrainerStrategy, register


class TiledDDPStrategy(TiledTrainerStrategy, DDPStrategy):
    """Tiling and activation checkpointing under DDP, with all arguments of :class:`DDPStrategy`."""


class FabricTiledDDPStrategy(TiledFabricStrategy, FabricDDPStrategy):
    """Tiling and activation checkpointing under DDP, with all arguments of Fabric's :class:`DDPStrategy`."""


register(TiledDDPStrategy, FabricTiledDDPStrategy, "tiled_ddp", "Tiled modules under DDP")
