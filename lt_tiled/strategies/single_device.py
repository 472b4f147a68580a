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
    _devices: list[torch.device] | None = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise ValueError(
                f"{type(self).__name__} runs on one device and was given {len(devices)}: pass devices=1, or a strategy"
                ' for several devices such as "tiled_ddp".'
            )
        self._devices = devices

    @property
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else self._root_device
