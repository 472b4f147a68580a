"""The strategies and callbacks of :mod:`lt_tiled` for the package ``pytorch_lightning``, under the same names."""

from pytorch_lightning import Callback
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)

from lt_tiled import callbacks
from lt_tiled.strategies.base import TiledTrainerStrategy, register
from lt_tiled.strategies.deepspeed import TrainerDeepSpeed
from lt_tiled.strategies.fsdp import TrainerFSDP
from lt_tiled.strategies.fsdp2 import TrainerFSDP2
from lt_tiled.strategies.single_device import FollowsAccelerator

__all__ = [
    "MemoryMonitor",
    "OffloadedCheckpointing",
    "SequenceLengthFinder",
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledMLP",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
    "TilingReport",
]


class TiledSingleDeviceStrategy(FollowsAccelerator, TiledTrainerStrategy, SingleDeviceStrategy):
    """:class:`lt_tiled.TiledSingleDeviceStrategy` for ``pytorch_lightning``."""


class TiledDDPStrategy(TiledTrainerStrategy, DDPStrategy):
    """:class:`lt_tiled.TiledDDPStrategy` for ``pytorch_lightning``."""


class TiledFSDPStrategy(TrainerFSDP, FSDPStrategy):
    """:class:`lt_tiled.TiledFSDPStrategy` for ``pytorch_lightning``."""


class TiledModelParallelStrategy(TrainerFSDP2, ModelParallelStrategy):
    """:class:`lt_tiled.TiledModelParallelStrategy` for ``pytorch_lightning``."""


class TiledDeepSpeedStrategy(TrainerDeepSpeed, DeepSpeedStrategy):
    """:class:`lt_tiled.TiledDeepSpeedStrategy` for ``pytorch_lightning``."""


class MemoryMonitor(callbacks.MemoryMonitor, Callback):
    """:class:`lt_tiled.callbacks.MemoryMonitor` for ``pytorch_lightning``."""


class OffloadedCheckpointing(callbacks.OffloadedCheckpointing, Callback):
    """:class:`lt_tiled.callbacks.OffloadedCheckpointing` for ``pytorch_lightning``."""


class SequenceLengthFinder(callbacks.SequenceLengthFinder, Callback):
    """:class:`lt_tiled.callbacks.SequenceLengthFinder` for ``pytorch_lightning``."""


class TiledMLP(callbacks.TiledMLP, Callback):
    """:class:`lt_tiled.callbacks.TiledMLP` for ``pytorch_lightning``."""


class TilingReport(callbacks.TilingReport, Callback):
    """:class:`lt_tiled.callbacks.TilingReport` for ``pytorch_lightning``."""


register(StrategyRegistry, globals())
