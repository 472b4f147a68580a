"""The strategies for Trainer, and their names in Lightning's registry."""

from lightning.pytorch.strategies import StrategyRegistry

from lt_tiled.strategies._names import register
from lt_tiled.strategies.ddp import TiledDDPStrategy
from lt_tiled.strategies.deepspeed import TiledDeepSpeedStrategy
from lt_tiled.strategies.fsdp import TiledFSDPStrategy
from lt_tiled.strategies.model_parallel import TiledModelParallelStrategy
from lt_tiled.strategies.single_device import TiledSingleDeviceStrategy

__all__ = [
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
]

register(
    StrategyRegistry,
    single_device=TiledSingleDeviceStrategy,
    ddp=TiledDDPStrategy,
    fsdp=TiledFSDPStrategy,
    model_parallel=TiledModelParallelStrategy,
    deepspeed=TiledDeepSpeedStrategy,
)
