"""Data parallel, for Fabric."""

from lightning.fabric.strategies.ddp import DDPStrategy

from lt_tiled.fabric._mixin import TiledStrategy


class TiledDDPStrategy(TiledStrategy, DDPStrategy):
    """Tiling and checkpointing under ``DistributedDataParallel``, with all of :class:`DDPStrategy`'s arguments."""
