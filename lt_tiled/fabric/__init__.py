"""The strategies for Fabric, and their names in Fabric's registry."""

from lightning.fabric.strategies import STRATEGY_REGISTRY

from lt_tiled.fabric.ddp import TiledDDPStrategy
from lt_tiled.fabric.single_device import TiledSingleDeviceStrategy

__all__ = ["TiledDDPStrategy", "TiledSingleDeviceStrategy"]

# `override` because a second import (a reloaded notebook) must not fail.
STRATEGY_REGISTRY.register("tiled", TiledSingleDeviceStrategy, "Tiled modules on a single device", override=True)
STRATEGY_REGISTRY.register("tiled_ddp", TiledDDPStrategy, "Tiled modules under DDP", override=True)
