"""The strategies and callbacks of :mod:`lt_tiled` for the package ``pytorch_lightning``, under the same names."""

from pytorch_lightning import Callback, strategies

from lt_tiled import callbacks, fabric
from lt_tiled.namespaces import register
from lt_tiled.strategies import base, deepspeed, fsdp, fsdp2

__all__ = fabric.__all__ + callbacks.__all__


class TiledSingleDeviceStrategy(base.SingleDevice, base.TiledTrainerStrategy, strategies.SingleDeviceStrategy):
    """:class:`lt_tiled.TiledSingleDeviceStrategy` for ``pytorch_lightning``."""


class TiledDDPStrategy(base.TiledTrainerStrategy, strategies.DDPStrategy):
    """:class:`lt_tiled.TiledDDPStrategy` for ``pytorch_lightning``."""


class TiledFSDPStrategy(fsdp.TrainerFSDP, strategies.FSDPStrategy):
    """:class:`lt_tiled.TiledFSDPStrategy` for ``pytorch_lightning``."""


class TiledModelParallelStrategy(fsdp2.TrainerFSDP2, strategies.ModelParallelStrategy):
    """:class:`lt_tiled.TiledModelParallelStrategy` for ``pytorch_lightning``."""


class TiledDeepSpeedStrategy(deepspeed.DeepSpeed, base.TiledTrainerStrategy, strategies.DeepSpeedStrategy):
    """:class:`lt_tiled.TiledDeepSpeedStrategy` for ``pytorch_lightning``."""


class MemoryMonitor(callbacks.MemoryMonitor, Callback):
    """:class:`lt_tiled.callbacks.MemoryMonitor` for ``pytorch_lightning``."""


class SequenceLengthFinder(callbacks.SequenceLengthFinder, Callback):
    """:class:`lt_tiled.callbacks.SequenceLengthFinder` for ``pytorch_lightning``."""


class Tiled(callbacks.Tiled, Callback):
    """:class:`lt_tiled.callbacks.Tiled` for ``pytorch_lightning``."""


class TilingReport(callbacks.TilingReport, Callback):
    """:class:`lt_tiled.callbacks.TilingReport` for ``pytorch_lightning``."""


register(strategies.StrategyRegistry, globals())
