"""One device."""

from __future__ import annotations

import torch

from lt_tiled.strategies.base import TiledStrategy


class FollowsAccelerator(TiledStrategy):
    """Takes the device from ``accelerator`` and ``devices``; Lightning's own class ignores them in favor of ``device``.

    Lightning's connectors set ``parallel_devices`` on a strategy that is passed as an object. Without them, ``device``
    counts.
    """

    _root_device: torch.device
    parallel_devices: list[torch.device] | None = None

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [self._root_device]
        if len(devices) > 1:
            raise ValueError(
                f"{type(self).__name__} runs on one device and was given {len(devices)}: pass devices=1, or a strategy"
                ' for several devices such as "tiled_ddp".'
            )
        return devices[0]
