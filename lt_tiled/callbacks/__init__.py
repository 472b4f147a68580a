"""Callbacks: tiling and offloading with any strategy, figures of each step, and the report of a run."""

from lt_tiled.callbacks.memory_monitor import MemoryMonitor
from lt_tiled.callbacks.offloaded_checkpointing import OffloadedCheckpointing
from lt_tiled.callbacks.report import TilingReport
from lt_tiled.callbacks.sequence_length_finder import SequenceLengthFinder
from lt_tiled.callbacks.tiled_mlp import TiledMLP

__all__ = ["MemoryMonitor", "OffloadedCheckpointing", "SequenceLengthFinder", "TiledMLP", "TilingReport"]
