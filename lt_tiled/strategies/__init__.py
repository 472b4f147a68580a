"""The strategies for Trainer, and their names in Lightning's registry."""

from lightning.pytorch.strategies import StrategyRegistry

from lt_tiled.strategies.ddp import TiledDDPStrategy
from lt_tiled.strategies.single_device import TiledSingleDeviceStrategy

__all__ = ["TiledDDPStrategy", "TiledSingleDeviceStrategy"]

# `override` because a second import (a reloaded notebook) must not fail.
StrategyRegistry.register("tiled", TiledSingleDeviceStrategy, "Tiled modules on a single device", override=True)
StrategyRegistry.register("tiled_ddp", TiledDDPStrategy, "Tiled modules under DDP", override=True)
