"""Callbacks: tiling and offloading with any strategy, figures of each step, and the report of a run."""

from lt_tiled.callbacks.measuring import MemoryMonitor, TilingReport
from lt_tiled.callbacks.preparing import Tiled
from lt_tiled.callbacks.sequence_length_finder import SequenceLengthFinder

__all__ = ["MemoryMonitor", "SequenceLengthFinder", "Tiled", "TilingReport"]
