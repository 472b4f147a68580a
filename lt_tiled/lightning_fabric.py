"""The strategies of :mod:`lt_tiled.fabric` for the package ``lightning_fabric``, under the same names."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning_fabric.strategies.fsdp import FSDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from lightning_fabric.strategies.single_device import SingleDeviceStrategy

from lt_tiled.strategies.base import TiledFabricStrategy, register
from lt_tiled.strategies.deepspeed import FabricDeepSpeed
from lt_tiled.strategies.fsdp import FabricFSDP
from lt_tiled.strategies.fsdp2 import FabricFSDP2
from lt_tiled.strategies.single_device import FollowsAccelerator

__all__ = [
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
]


class TiledSingleDeviceStrategy(FollowsAccelerator, TiledFabricStrategy, SingleDeviceStrategy):
    """:class:`lt_tiled.fabric.TiledSingleDeviceStrategy` for ``lightning_fabric``."""


class TiledDDPStrategy(TiledFabricStrategy, DDPStrategy):
    """:class:`lt_tiled.fabric.TiledDDPStrategy` for ``lightning_fabric``."""


class TiledFSDPStrategy(FabricFSDP, FSDPStrategy):
    """:class:`lt_tiled.fabric.TiledFSDPStrategy` for ``lightning_fabric``."""


class TiledModelParallelStrategy(FabricFSDP2, ModelParallelStrategy):
    """:class:`lt_tiled.fabric.TiledModelParallelStrategy` for ``lightning_fabric``."""


class TiledDeepSpeedStrategy(FabricDeepSpeed, DeepSpeedStrategy):
    """:class:`lt_tiled.fabric.TiledDeepSpeedStrategy` for ``lightning_fabric``."""


register(STRATEGY_REGISTRY, globals())
