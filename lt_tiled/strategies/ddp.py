"""Data parallel, for Trainer."""

from lightning.pytorch.strategies import DDPStrategy

from lt_tiled.strategies._mixin import TiledStrategy


class TiledDDPStrategy(TiledStrategy, DDPStrategy):
    """Tiling and checkpointing under ``DistributedDataParallel``, with all of :class:`DDPStrategy`'s arguments."""
