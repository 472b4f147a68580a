"""Measurements that take time, and whose figures the documentation quotes. Many of their models are small."""

from lt_tiled.offload import offloader

offloader.MIN_BYTES = 0
