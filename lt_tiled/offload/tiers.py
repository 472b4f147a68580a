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
from lt_tiled.offload.pinned import Copier, Copy, Slabs, Slot
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
        if self.into.is_cuda:  # it may be another stream than that for which the tensor was allocated
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
        if (slot := self.slabs.take(raw.nbytes, raw.device)) is None:
            return None
        if raw.device.type == "cpu":
            inform(
                "The model runs on the CPU, so its block inputs are in CPU memory already: offload='disk' saves memory"
                " there, offload='cpu' does not.",
                once="offload CPU to CPU",
            )
        return _OnCPU(self.copier, slot, raw)


class _OnCPU:
    tier: TierName = "cpu"

    def __init__(self, copier: Copier, slot: Slot, raw: Tensor) -> None:
        self.copier, self.slot, self.device, self.nbytes = copier, slot, raw.device, raw.nbytes
        self.left = copier.copy("store", raw, slot)

    def settled(self) -> bool:
        return self.left is None or self.left.ended()

    def settle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.settled():
            if time.monotonic() > end:
                raise OffloadError(f"the copy to CPU memory has not ended within {seconds:g} s")
            time.sleep(1e-4)

    def load(self) -> Loading:
        into = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if (copied := self.copier.copy("load", into, self.slot)) is None:
            return Loading(into, lambda: True, lambda _: None)

        def finish(_: float) -> None:
            torch.cuda.current_stream(into.device).wait_event(copied.end)
            copied.tensor = None  # the stream that uses it waits, so it may be dropped

        return Loading(into, copied.end.query, finish)


class DiskTier(_Tier):
    """A spill file. It is written from CPU tensors directly, and from those of other devices through CPU memory."""

    def __init__(self, spill: SpillFile) -> None:
        super().__init__(_UNBOUNDED)
        self.spill = spill

    def store(self, raw: Tensor) -> Stored:
        """Begin to write.

        Raises:
            OffloadDiskFullError: If there is no room.
        """
        extent = self.spill.take(raw.nbytes)
        if raw.device.type == "cpu":
            return _OnDisk(self, raw, extent, self.spill.write(extent, *_views([raw])))
        slot = self.stage(raw)
        wait = partial(_synchronize, self.copier.copy("store", raw, slot), slot)
        return _OnDisk(self, raw, extent, self.spill.write(extent, *_views(slot.memory), first=wait))

    def stage(self, raw: Tensor) -> Slot:
        if (slot := self.slabs.take(raw.nbytes, raw.device)) is None:
            reason = f"the system has no {raw.nbytes} bytes of CPU memory to stage a tensor in"
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
        slot = None if self.device.type == "cpu" else self.home.stage(into)
        copy = partial(self.home.copier.copy, "load", into, cast(Slot, slot))  # used if there is one
        then: Callable[[], None] | None = None
        if into.is_cuda:
            allocated = torch.cuda.current_stream(self.device).record_event()
            then = lambda: _synchronize(copy(allocated), slot)  # noqa: E731
        elif slot is not None:
            then = partial(_synchronize, None, slot)  # keeps the slot until the read has ended, whoever drops this
        read = self.home.spill.read(self.extent, *_views([into] if slot is None else slot.memory), then=then)
        self._calls = [call for call in self._calls if not call.done] + [read]
        wait = partial(self._wait, read, "read")  # without the slot, which is free when it has been copied

        def wait_and_copy(seconds: float) -> None:
            wait(seconds)
            copy()

        return Loading(into, lambda: read.done, wait if slot is None or into.is_cuda else wait_and_copy)

    def _wait(self, call: Call, verb: str, seconds: float) -> None:
        self.home.spill.wait(call, f"the {verb} of {self.nbytes} bytes", seconds, self.extent.offset)

    def __del__(self) -> None:
        for call in self._calls:
            call.cancel()


def _synchronize(copied: Copy | None, slot: Slot | None) -> None:
    """Wait for a copy. A call that will do so keeps the slot until then."""
    if copied is not None:
        with torch.cuda.device(copied.stream.device):
            copied.end.synchronize()
        copied.tensor = None


def _views(memory: Sequence[Tensor]) -> list[memoryview]:
    """Return the bytes of flat CPU tensors, which the views keep alive."""
    return [memoryview(cast(Any, piece.numpy())) for piece in memory]
