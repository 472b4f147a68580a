"""The same features for people who keep their own strategy, and the report of a run."""

from lt_tiled.callbacks.offloaded_checkpointing import OffloadedCheckpointing
from lt_tiled.callbacks.report import TilingReport
from lt_tiled.callbacks.tiled_mlp import TiledMLP

__all__ = ["OffloadedCheckpointing", "TiledMLP", "TilingReport"]
