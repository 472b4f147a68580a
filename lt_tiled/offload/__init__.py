"""Boundaries of checkpointed blocks in RAM and on disk."""

from lt_tiled.offload.errors import OffloadDiskFull, OffloadError

__all__ = ["OffloadDiskFull", "OffloadError"]
