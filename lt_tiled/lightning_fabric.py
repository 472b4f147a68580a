"""The strategies of :mod:`lt_tiled.fabric` for the package ``lightning_fabric``, under the same names."""

from lightning_fabric import strategies

from lt_tiled import fabric
from lt_tiled.strategies import base, deepspeed, fsdp, fsdp2, single_device

__all__ = fabric.__all__


class TiledSingleDeviceStrategy(
    single_device.FollowsAccelerator, base.TiledFabricStrategy, strategies.SingleDeviceStrategy
):
    """:class:`lt_tiled.fabric.TiledSingleDeviceStrategy` for ``lightning_fabric``."""


class TiledDDPStrategy(base.TiledFabricStrategy, strategies.DDPStrategy):
    """:class:`lt_tiled.fabric.TiledDDPStrategy` for ``lightning_fabric``."""


class TiledFSDPStrategy(fsdp.FabricFSDP, strategies.FSDPStrategy):
    """:class:`lt_tiled.fabric.TiledFSDPStrategy` for ``lightning_fabric``."""


class TiledModelParallelStrategy(fsdp2.FabricFSDP2, strategies.ModelParallelStrategy):
    """:class:`lt_tiled.fabric.TiledModelParallelStrategy` for ``lightning_fabric``."""


class TiledDeepSpeedStrategy(deepspeed.FabricDeepSpeed, strategies.DeepSpeedStrategy):
    """:class:`lt_tiled.fabric.TiledDeepSpeedStrategy` for ``lightning_fabric``."""


base.register(strategies.STRATEGY_REGISTRY, globals())
