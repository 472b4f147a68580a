"""Where boundaries go: RAM, and the disk. A tier takes bytes and gives them back; it knows nothing of graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from lt_tiled._log import inform_once
from lt_tiled.errors import OffloadError
from lt_tiled.offload.pinned import Copier, Copiers, Slabs, Slot
from lt_tiled.offload.spill import SpillFile

TierName = Literal["cpu", "disk"]

_UNBOUNDED = 2**62  # what is staged is bounded by the number of boundaries in flight


class Loading(Protocol):
    """Bytes on their way back."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self, seconds: float) -> Tensor:
        """The bytes on their device, ordered before what the current stream does next."""


class Stored(Protocol):
    """Bytes on a tier, or on their way to it."""

    tier: TierName
    nbytes: int

    def settled(self) -> bool:
        """Whether the source is no longer needed."""

    def settle(self, seconds: float) -> None:
        """Wait for that. Raises :class:`OffloadError` if the bytes could not be stored, or not within ``seconds``."""

    def load(self) -> Loading:
        """Begin to bring the bytes back. May be called any number of times."""

    def free(self) -> None:
        """Give the space back, once nothing reads or writes it any more. Never blocks."""


# RAM


class RamTier:
    """RAM up to a budget."""

    def __init__(self, budget: int) -> None:
        self.slabs = Slabs(budget)
        self.copiers = Copiers()

    def store(self, raw: Tensor) -> Stored | None:
        """Begin to copy; ``None`` if the budget has no room."""
        slot = self.slabs.take(raw.nbytes, pin=raw.is_cuda)
        if slot is None:
            return None
        if not raw.is_cuda:
            inform_once(
                "cpu to RAM",
                "Boundaries of a model on the CPU are in RAM already: offload='cpu' frees nothing there, 'disk' does.",
            )
        copier = self.copiers[raw.device]
        return _InRam(copier, slot, copier.copy(slot.memory, raw))

    def free_buffers(self) -> None:
        self.slabs.free_unused()

    def close(self) -> None:
        self.copiers.synchronize()
        self.slabs.close()


class _InRam:
    tier: TierName = "cpu"

    def __init__(self, copier: Copier, slot: Slot, copied: torch.cuda.Event | None) -> None:
        self.copier = copier
        self.slot = slot
        self.copied = copied
        self.nbytes = slot.memory.nbytes
        self._last = copied
        """The end of the last copy from or to the slot; one stream makes them in order."""

    def settled(self) -> bool:
        return self.copied is None or self.copied.query()

    def settle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.settled():
            if time.monotonic() > end:
                raise OffloadError(f"the copy to RAM has not ended within {seconds:g} s")
            time.sleep(1e-4)

    def load(self) -> Loading:
        into = torch.empty(self.nbytes, dtype=torch.uint8, device=self.copier.device)
        self._last = self.copier.copy(into, self.slot.memory)
        return _FromRam(into, self._last)

    def free(self) -> None:
        self.slot.free(after=self._last)


class _FromRam:
    def __init__(self, into: Tensor, copied: torch.cuda.Event | None) -> None:
        self.into = into
        self.copied = copied

    def ready(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self, seconds: float) -> Tensor:
        if self.copied is not None:
            torch.cuda.current_stream(self.into.device).wait_event(self.copied)
        return _for_current_stream(self.into)


# Disk


class DiskTier:
    """A spill file. CPU tensors are written from where they stand; those of a GPU pass through page-locked RAM."""

    def __init__(self, spill: SpillFile) -> None:
        self.spill = spill
        self.staging = Slabs(_UNBOUNDED)
        self.copiers = Copiers()

    def store(self, raw: Tensor) -> Stored:
        """Begin to write.

        Raises:
            OffloadDiskFullError: If there is no room.
        """
        offset = self.spill.take(raw.nbytes)
        try:
            if not raw.is_cuda:
                return _OnDisk(self, raw.device, offset, raw.nbytes, self.spill.write(offset, _view(raw)))
            slot = self.stage(raw.nbytes)
            copied = self.copiers[raw.device].copy(slot.memory, raw)
            assert copied is not None
            written = self.spill.write(offset, _view(slot.memory), first=lambda: _synchronize(copied, raw.device))
            written.add_done_callback(
                lambda _: slot.free(after=copied)
            )  # a write that was cancelled has not waited for the copy
            return _OnDisk(self, raw.device, offset, raw.nbytes, written)
        except BaseException:
            self.spill.give_back(offset, raw.nbytes)
            raise

    def stage(self, nbytes: int) -> Slot:
        slot = self.staging.take(nbytes, pin=True)
        if slot is None:
            raise OffloadError(
                f"the system has no {nbytes} bytes of RAM to stage a boundary in", directory=self.spill.directory
            )
        return slot

    def free_buffers(self) -> None:
        self.staging.free_unused()

    def close(self) -> None:
        self.spill.close()
        self.copiers.synchronize()
        self.staging.close()


class _OnDisk:
    tier: TierName = "disk"

    def __init__(self, home: DiskTier, device: torch.device, offset: int, nbytes: int, written: Future[None]) -> None:
        self.home = home
        self.device = device
        self.offset = offset
        self.nbytes = nbytes
        self.written = written
        self._busy: list[Future[None]] = [written]

    def settled(self) -> bool:
        return self.written.done()

    def settle(self, seconds: float) -> None:
        _result(self.written, seconds, "write", self)

    def load(self) -> Loading:
        into = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            loading = _FromDisk(self, into, self.home.spill.read(self.offset, _view(into)))
        else:
            slot = self.home.stage(self.nbytes)
            allocated = torch.cuda.current_stream(self.device).record_event()
            read = self.home.spill.read(self.offset, _view(slot.memory), then=self._to_device(into, slot, allocated))
            read.add_done_callback(lambda _: slot.free())
            loading = _FromDisk(self, into, read)
        self._busy = [future for future in self._busy if not future.done()] + [loading.read]
        return loading

    def _to_device(self, into: Tensor, slot: Slot, allocated: torch.cuda.Event) -> Callable[[], None]:
        stream = self.home.copiers[self.device].stream
        assert stream is not None

        def copy() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(allocated)
                into.copy_(slot.memory, non_blocking=True)
                event = stream.record_event(torch.cuda.Event(blocking=True))
            _synchronize(event, into.device)

        return copy

    def free(self) -> None:
        running = [future for future in self._busy if not future.cancel()]

        def when_idle(_: Future[None] | None = None) -> None:
            while running:
                future = running.pop()
                if not future.done():
                    future.add_done_callback(when_idle)
                    return
            self.home.spill.give_back(self.offset, self.nbytes)

        when_idle()


class _FromDisk:
    def __init__(self, stored: _OnDisk, into: Tensor, read: Future[None]) -> None:
        self.stored = stored
        self.into = into
        self.read = read

    def ready(self) -> bool:
        return self.read.done()

    def wait(self, seconds: float) -> Tensor:
        _result(self.read, seconds, "read", self.stored)
        return _for_current_stream(self.into)


def _synchronize(event: torch.cuda.Event, device: torch.device) -> None:
    with torch.cuda.device(device):  # a thread begins on the first device, and would make a context there
        event.synchronize()


def _for_current_stream(tensor: Tensor) -> Tensor:
    """It may be used on another stream than the one that was current when it was allocated: the allocator has to
    know.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _view(memory: Tensor) -> memoryview:
    """The bytes of a flat CPU tensor; the view keeps them alive."""
    return memoryview(cast(Any, memory.numpy()))


def _result(future: Future[None], seconds: float, verb: str, stored: _OnDisk) -> None:
    try:
        future.result(seconds)
    except FutureTimeoutError as error:
        spill = stored.home.spill
        reason = f"the {verb} of {stored.nbytes} bytes has not ended within {seconds:g} s"
        raise OffloadError(reason, offset=stored.offset, directory=spill.directory) from error
