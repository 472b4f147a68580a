"""The strategies for Fabric, and their names in Fabric's registry."""

from lightning.fabric.strategies import STRATEGY_REGISTRY

from lt_tiled.fabric.ddp import TiledDDPStrategy
from lt_tiled.fabric.deepspeed import TiledDeepSpeedStrategy
from lt_tiled.fabric.fsdp import TiledFSDPStrategy
from lt_tiled.fabric.model_parallel import TiledModelParallelStrategy
from lt_tiled.fabric.single_device import TiledSingleDeviceStrategy
from lt_tiled.strategies._names import register

__all__ = [
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
]

register(
    STRATEGY_REGISTRY,
    single_device=TiledSingleDeviceStrategy,
    ddp=TiledDDPStrategy,
    fsdp=TiledFSDPStrategy,
    model_parallel=TiledModelParallelStrategy,
    deepspeed=TiledDeepSpeedStrategy,
)
