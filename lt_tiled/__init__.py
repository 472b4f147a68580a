"""Train with long context in Lightning and Fabric: tiled MLPs and losses, activation checkpointing, offloading."""

from lt_tiled import callbacks, fabric
from lt_tiled._prepare import Prepared, prepare
from lt_tiled.errors import (
    DoesNotFitError,
    NothingFoundError,
    NotPositionWiseError,
    OffloadDiskFullError,
    OffloadError,
    SimulationError,
)
from lt_tiled.loss.functional import tiled_linear_cross_entropy, tiled_token_logprobs
from lt_tiled.policies import ActivationCheckpointing, SequenceParallel, Tiling
from lt_tiled.sequence_parallel.attention import shared_attention
from lt_tiled.tiling.api import tile, untile
from lt_tiled.trainer import (
    TiledDDPStrategy,
    TiledDeepSpeedStrategy,
    TiledFSDPStrategy,
    TiledModelParallelStrategy,
    TiledSingleDeviceStrategy,
)
from lt_tiled.verification import Verification, verify

__version__ = "0.4.0"

__all__ = [
    "ActivationCheckpointing",
    "DoesNotFitError",
    "NotPositionWiseError",
    "NothingFoundError",
    "OffloadDiskFullError",
    "OffloadError",
    "Prepared",
    "SequenceParallel",
    "SimulationError",
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
    "Tiling",
    "Verification",
    "callbacks",
    "fabric",
    "prepare",
    "shared_attention",
    "tile",
    "tiled_linear_cross_entropy",
    "tiled_token_logprobs",
    "untile",
    "verify",
]
