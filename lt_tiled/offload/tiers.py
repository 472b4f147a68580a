"""The tiers: CPU memory and disk. A tier stores bytes and loads them again; it does not know autograd graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from lt_tiled._log import inform
from lt_tiled.errors import OffloadError
from lt_tiled.offload.extents import Extent
from lt_tiled.offload.pinned import Copier, Slabs, Slot
from lt_tiled.offload.spill import Call, SpillFile

TierName = Literal["cpu", "disk"]

_UNBOUNDED = 2**62  # the number of tensors in flight bounds the staging memory


@dataclass(frozen=True)
class Loading:
    """Bytes that are being loaded to their device. ``ready`` returns whether :meth:`wait` returns at once."""

    into: Tensor
    ready: Callable[[], bool]
    finish: Callable[[float], object]

    def wait(self, seconds: float) -> Tensor:
        """Return the bytes, which the current stream may use, after at most so many seconds."""
        self.finish(seconds)
        if self.into.is_cuda:  # the allocator must know each stream that uses the tensor
            self.into.record_stream(torch.cuda.current_stream(self.into.device))
        return self.into


class Stored(Protocol):
    """Bytes that are stored on a tier, or being stored. Their space is free when nothing refers to this."""

    tier: TierName

    def settled(self) -> bool:
        """Return whether the source is no longer needed."""

    def settle(self, seconds: float) -> None:
        """Wait until it is not. Raise :class:`OffloadError` if storing failed or took longer than ``seconds``."""

    def load(self) -> Loading:
        """Begin to load the bytes. May be called any number of times."""


class _Tier:
    def __init__(self, budget: int) -> None:
        self.slabs = Slabs(budget)
        self.copier = Copier()

    def free_buffers(self) -> None:
        self.slabs.free_unused()

    def close(self) -> None:
        self.copier.synchronize()
        self.slabs.close()


class CPUTier(_Tier):
    """CPU memory up to a budget in bytes."""

    def store(self, raw: Tensor) -> Stored | None:
        """Begin to copy; return ``None`` if the budget has no room."""
        if (slot := self.slabs.take(raw.nbytes, pin=raw.is_cuda)) is None:
            return None
        if not raw.is_cuda:
            inform(
                "The model runs on the CPU, so its block inputs are in CPU memory already: offload='disk' saves memory"
                " there, offload='cpu' does not.",
                once="offload CPU to CPU",
            )
        return _OnCPU(self.copier, slot, raw)


class _OnCPU:
    tier: TierName = "cpu"

    def __init__(self, copier: Copier, slot: Slot, raw: Tensor) -> None:
        self.copier, self.slot, self.device = copier, slot, raw.device
        self.left = slot.copied = copier.copy(slot.memory, raw)

    def settled(self) -> bool:
        return self.left is None or self.left.query()

    def settle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.settled():
            if time.monotonic() > end:
                raise OffloadError(f"the copy to CPU memory has not ended within {seconds:g} s")
            time.sleep(1e-4)

    def load(self) -> Loading:
        into = torch.empty_like(self.slot.memory, device=self.device)
        copied = self.slot.copied = self.copier.copy(into, self.slot.memory)
        if copied is None:
            return Loading(into, lambda: True, lambda _: None)
        return Loading(into, copied.query, lambda _: torch.cuda.current_stream(into.device).wait_event(copied))


class DiskTier(_Tier):
    """A spill file. It is written from CPU tensors directly, and from those of a GPU through pinned memory."""

    def __init__(self, spill: SpillFile) -> None:
        super().__init__(_UNBOUNDED)
        self.spill = spill

    def store(self, raw: Tensor) -> Stored:
        """Begin to write.

        Raises:
            OffloadDiskFullError: If there is no room.
        """
        extent = self.spill.take(raw.nbytes)
        if not raw.is_cuda:
            return _OnDisk(self, raw, extent, self.spill.write(extent, _view(raw)))
        slot = self.stage(raw.nbytes)
        slot.copied = self.copier.copy(slot.memory, raw)
        wait = partial(_synchronize, slot, raw.device)  # keeps the slot until the write has ended
        return _OnDisk(self, raw, extent, self.spill.write(extent, _view(slot.memory), first=wait))

    def stage(self, nbytes: int) -> Slot:
        if (slot := self.slabs.take(nbytes, pin=True)) is None:
            reason = f"the system has no {nbytes} bytes of CPU memory to stage a tensor in"
            raise OffloadError(reason, directory=self.spill.directory)
        return slot

    def close(self) -> None:
        self.spill.close()
        super().close()


class _OnDisk:
    tier: TierName = "disk"
    _calls: Sequence[Call] = ()  # for __del__, if Ctrl-C ends the constructor

    def __init__(self, home: DiskTier, raw: Tensor, extent: Extent, written: Call) -> None:
        self.home, self.extent, self.written = home, extent, written
        self.device, self.nbytes = raw.device, raw.nbytes
        self._calls = [written]

    def settled(self) -> bool:
        return self.written.done

    def settle(self, seconds: float) -> None:
        self._wait(self.written, "write", seconds)

    def load(self) -> Loading:
        into = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            read = self.home.spill.read(self.extent, _view(into))
        else:
            slot, copier = self.home.stage(self.nbytes), self.home.copier
            allocated = torch.cuda.current_stream(self.device).record_event()

            def copy() -> None:
                slot.copied = copier.copy(into, slot.memory, allocated)
                _synchronize(slot, into.device)

            read = self.home.spill.read(self.extent, _view(slot.memory), then=copy)
        self._calls = [call for call in self._calls if not call.done] + [read]
        return Loading(into, lambda: read.done, partial(self._wait, read, "read"))

    def _wait(self, call: Call, verb: str, seconds: float) -> None:
        self.home.spill.wait(call, f"the {verb} of {self.nbytes} bytes", seconds, self.extent.offset)

    def __del__(self) -> None:
        for call in self._calls:
            call.cancel()


def _synchronize(slot: Slot, device: torch.device) -> None:
    """Wait for the slot's copy."""
    assert slot.copied is not None
    with torch.cuda.device(device):  # a new thread would create a context on the first device
        slot.copied.synchronize()


def _view(memory: Tensor) -> memoryview:
    """Return the bytes of a flat CPU tensor, which the view keeps alive."""
    return memoryview(cast(Any, memory.numpy()))
