"""The strategies for Fabric. They have the names that the strategies for Trainer have in :mod:`lt_tiled`."""

from lt_tiled.strategies.ddp import FabricTiledDDPStrategy as TiledDDPStrategy
from lt_tiled.strategies.deepspeed import FabricTiledDeepSpeedStrategy as TiledDeepSpeedStrategy
from lt_tiled.strategies.fsdp import FabricTiledFSDPStrategy as TiledFSDPStrategy
from lt_tiled.strategies.fsdp2 import FabricTiledModelParallelStrategy as TiledModelParallelStrategy
from lt_tiled.strategies.single_device import FabricTiledSingleDeviceStrategy as TiledSingleDeviceStrategy

__all__ = [
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
]

for _name in __all__:  # in messages, reprs and pickles the classes have the names of this module
    _strategy = globals()[_name]
    _strategy.__module__, _strategy.__name__, _strategy.__qualname__ = __name__, _name, _name
