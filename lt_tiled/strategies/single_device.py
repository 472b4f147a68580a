"""One device, for Trainer."""

from lightning.pytorch.strategies import SingleDeviceStrategy

from lt_tiled.strategies._device import FollowsAccelerator
from lt_tiled.strategies._mixin import TiledStrategy


class TiledSingleDeviceStrategy(FollowsAccelerator, TiledStrategy, SingleDeviceStrategy):
    """Tiling and checkpointing on one device, the one that the Trainer's ``accelerator`` and ``devices`` name."""
