"""The strategies for Trainer. One file per engine holds its strategies for Trainer and for Fabric."""

from lt_tiled.strategies.ddp import TiledDDPStrategy
from lt_tiled.strategies.deepspeed import TiledDeepSpeedStrategy
from lt_tiled.strategies.fsdp import TiledFSDPStrategy
from lt_tiled.strategies.fsdp2 import TiledModelParallelStrategy
from lt_tiled.strategies.single_device import TiledSingleDeviceStrategy

__all__ = [
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
]
