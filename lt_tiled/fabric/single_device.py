"""One device, for Fabric."""

from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from lt_tiled.fabric._mixin import TiledStrategy
from lt_tiled.strategies._device import FollowsAccelerator


class TiledSingleDeviceStrategy(FollowsAccelerator, TiledStrategy, SingleDeviceStrategy):
    """Tiling and checkpointing on one device, the one that Fabric's ``accelerator`` and ``devices`` name."""
