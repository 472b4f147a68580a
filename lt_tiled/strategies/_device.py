"""The devices that strategies run on."""

from __future__ import annotations

from typing import Any

import torch


def on_cpu(strategy: Any) -> bool:
    """Whether the strategy trains on the CPU."""
    return bool(strategy.root_device.type == "cpu")


class FollowsAccelerator:
    """Takes its device from ``accelerator`` and ``devices``, where Lightning's own class stays on its ``device``
    argument, the CPU.

    Lightning's connectors fill ``parallel_devices`` of a strategy that they did not build. ``device`` counts only
    without them.
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
                f"{type(self).__name__} runs on one device and was given {len(devices)}: pass devices=1, or a strategy for several"
                ' devices such as "tiled_ddp".'
            )
        self._devices = devices

    @property
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else self._root_device
