"""The tier on a disk: one file per process without a name, which the system deletes however the process ends."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.memory import gib
from lt_tiled.offload.pinned import Buffer, CPUMemory, Stored, aligned

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    errno.ENOSPC: "set another directory, lower disk_budget, or delete files there",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or set another directory",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "look for errors of the disk in the system's log (dmesg), or set another directory",
}


@dataclass(frozen=True, eq=False)
class Place:
    """A range of the file, in use while this object is alive. See NOTE [Rooms] in ``pinned.py``."""

    offset: int
    nbytes: int


class Disk:
    """The tier in a private file. Two threads move bytes between it and pinned memory; nothing is synced.

    Bytes of a budget are reserved in the directory now, and never exceeded; without one the file grows as needed.
    ``direct`` bypasses the page cache if the filesystem supports it.
    """

    def __init__(self, directory: str, budget: int | None = None, *, direct: bool = True) -> None:
        self.directory = directory
        reserved = aligned(budget or 0)
        self.limit = reserved or sys.maxsize
        self._memory = CPUMemory(sys.maxsize)  # the number of tensors in flight bounds it
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lt_tiled-disk")
        self._calls: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        self._file = self._open(reserved)
        # Each call refers to the disk, so that the file is open until the last one has ended.
        self._close = weakref.finalize(self, _close_file, self._file, os.getpid())
        self.direct = False
        with suppress(OSError):  # the filesystem does not support the flag
            self._set_direct(direct)

    def _open(self, reserved: int) -> int:
        """Open a file without a name (``O_TMPFILE``), or one that is unlinked at once, and reserve its space."""
        try:
            with tempfile.TemporaryFile(prefix="lt_tiled-", dir=self.directory, buffering=0) as file:
                if reserved:
                    os.posix_fallocate(file.fileno(), 0, reserved)
                return os.dup(file.fileno())
        except OSError as error:
            raise self._error(f"cannot create a file of at least {gib(reserved)}", error) from error

    def store(self, raw: Tensor, after: torch.cuda.Event | None) -> Stored:
        """Begin to write bytes once an event has passed."""
        place = self._take(aligned(raw.nbytes))
        copied = self._memory.store(raw, after)
        assert copied is not None
        call = self._submit(partial(self._write, place, copied))
        return Stored(place, call.done, partial(wait_for, call))

    def load(self, room: Place, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        """Begin to read bytes. Return a function that waits for them and copies them to the device."""
        buffer = self._memory.take(nbytes, device)
        assert buffer is not None
        call = self._submit(partial(self._move, "read", room, buffer))

        def loaded() -> Tensor:
            wait_for(call)
            return self._memory.load(buffer, nbytes, device)()

        return loaded

    def _take(self, need: int) -> Place:
        """Return a place, which is free again when nothing refers to it."""
        start = self._free_from(need)
        if start + need > self.limit:
            wait(list(self._calls))  # the place of a graph that is gone is free when its last call has ended
            gc.collect()  # errors leave graphs in reference cycles
            start = self._free_from(need)
        if start + need > self.limit:
            reason = f"this rank's share of disk_budget, {self.limit} bytes, has no room for {need} bytes more"
            raise OffloadDiskFullError(f"{reason} in {self.directory!r}: raise disk_budget")
        place = Place(start, need)
        self._places.add(place)
        return place

    def _free_from(self, need: int) -> int:
        """Return where the first range begins that has so many bytes and that no place uses."""
        start = 0
        for place in sorted(self._places, key=lambda place: place.offset):
            if place.offset - start >= need:
                break
            start = place.offset + place.nbytes
        return start

    def _submit(self, run: Callable[[], None]) -> Future[None]:
        """Begin to call ``run``. It is dropped, with the rooms that it refers to, before the future is done."""
        held = [run]

        def call() -> None:
            try:
                held[0]()
            finally:
                held.clear()

        future = self._threads.submit(call)
        self._calls.add(future)
        return future

    def _write(self, place: Place, copied: Stored) -> None:
        copied.wait()
        self._move("write", place, copied.room)

    def _move(self, verb: Literal["write", "read"], place: Place, buffer: Buffer) -> None:
        """Call until all bytes are moved, because one call may move fewer."""
        call = os.pwritev if verb == "write" else os.preadv
        offset = place.offset
        for piece in buffer.pieces:
            left = memoryview(cast(Any, piece.numpy()))
            while left:
                direct = self.direct
                try:
                    moved = call(self._file, [left], offset)
                    if moved <= 0:
                        raise OSError(errno.EIO, f"a short {verb}, {len(left)} bytes are left")
                except OSError as error:
                    if error.errno == errno.EINVAL and direct:
                        self._set_direct(False)
                        continue
                    raise self._error(f"cannot {verb} {gib(place.nbytes)}", error) from error
                left = left[moved:]
                offset += moved

    def _set_direct(self, direct: bool) -> None:
        """Set or clear ``O_DIRECT``, which some filesystems refuse at once and some in the first call."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT * direct)
        self.direct = direct

    def _error(self, reason: str, cause: OSError) -> OffloadError:
        """Return an error that says why the system refused a call, and what to do."""
        remedy = _REMEDIES.get(cause.errno or 0, "set another directory, which exists and is writable")
        kind = OffloadDiskFullError if cause.errno in _NO_ROOM else OffloadError
        return kind(f"{reason} in {self.directory!r}: {cause.strerror or cause}: {remedy}")

    def close(self) -> None:
        """Cancel waiting calls, let running ones end, and free disk space and memory."""
        self._threads.shutdown(cancel_futures=True)
        self._close()
        self._memory.close()


def wait_for(call: Future[None]) -> None:
    """Wait until a call has ended, and raise its error."""
    if (error := call.exception()) is not None:
        # A copy: the error itself stays in the future, and with this traceback would keep the step's graph alive.
        raise copy(error) from error.__cause__


def _close_file(file: int, process: int) -> None:
    with suppress(OSError):  # of a network disk that is gone; the data has no use any more
        if os.getpid() == process:  # a fork shares the file
            os.ftruncate(file, 0)  # workers of a DataLoader that were forked hold the file open too
    with suppress(OSError):
        os.close(file)
