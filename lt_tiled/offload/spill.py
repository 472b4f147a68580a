"""The spill file: one unlinked file per process, which the system deletes however the process ends."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import tempfile
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from copy import copy
from pathlib import Path
from threading import local
from typing import Any, Literal

from lt_tiled._log import warn
from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.memory import gib
from lt_tiled.offload.extents import ALIGNMENT, Extent, Extents, aligned

CHUNK = 8 * 2**20
"""The bytes per system call, and of each thread's page-aligned buffer."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Buffer(local):
    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, CHUNK))


class SpillFile:
    """Raw bytes at aligned offsets of an unlinked file, which two threads write and read.

    The file has mode 0600 and no name. Space is reserved before it is written. Nothing is synced, because the data has
    no use after a crash.

    Args:
        directory: An existing directory on the disk to use.
        budget: The bytes to reserve now and never exceed; ``None`` reserves space as the file grows.
        direct: Bypass the page cache if the filesystem supports it.
    """

    def __init__(self, directory: str | Path, budget: int | None = None, *, direct: bool = True) -> None:
        self.directory = str(directory)
        self.budget = None if budget is None else aligned(budget)
        self.direct = False
        self._extents = Extents()
        self._buffer = _Buffer()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lt_tiled-spill")
        self._calls: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        self._open(direct)
        # Each call refers to the file, so that it is open until the last one has ended.
        self._close = weakref.finalize(self, _close_file, self._file, self.directory, os.getpid())
        if self.budget is not None:
            try:
                self._grow(self.budget)
            except BaseException:
                self.close()
                raise

    def take(self, nbytes: int) -> Extent:
        """Reserve a range, which is free again when nothing refers to it."""
        need, collected = aligned(nbytes), False
        while (extent := self._take(need)) is None:
            if running := [call for call in list(self._calls) if not call.done()]:
                wait(running[:1])  # it may free a range
                continue
            if collected:
                share = f"this rank's share of disk_budget, {gib(self.budget or 0)}, has no free range of {gib(need)}"
                reason = f"{share} ({gib(self.used)} are in use): raise disk_budget"
                raise OffloadDiskFullError(reason, directory=self.directory)
            gc.collect()  # errors leave graphs in reference cycles
            collected = True
        return extent

    def _take(self, need: int) -> Extent | None:
        extent = self._extents.take(need)
        if extent is None and self.budget is None:
            more = need - self._extents.free_at_end()
            if more > 0:  # a thread may have freed some since
                self._grow(more)
            extent = self._extents.take(need)
        return extent

    @property
    def used(self) -> int:
        return self._extents.used

    def _grow(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._file, self._extents.size, nbytes)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._extents.size)  # ext4 keeps what it reserved before it failed
            raise self._error(f"cannot reserve {gib(nbytes)} more", error) from error
        self._extents.size += nbytes

    def write(
        self, extent: Extent, data: Sequence[memoryview], first: Callable[[], None] | None = None
    ) -> Future[None]:
        """Begin to call ``first`` and then write a range. ``data`` must not change until the call has ended.

        All pieces of the data but the last have an aligned number of bytes.
        """
        return self._submit(self._write, extent, data, first)

    def read(self, extent: Extent, into: Sequence[memoryview], then: Callable[[], None] | None = None) -> Future[None]:
        """Begin to read a range of the length of ``into``, whose pieces are as in :meth:`write`, then call ``then``."""
        return self._submit(self._read, extent, into, then)

    def _submit(self, run: Callable[..., None], *args: Any) -> Future[None]:
        held = [*args]

        def call() -> None:
            try:
                run(*held)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they refer to the range and to its data
                raise
            finally:
                held.clear()  # before anyone learns that the call has ended: then the range must be free

        future = self._threads.submit(call)
        self._calls.add(future)
        return future

    def _write(self, extent: Extent, data: Sequence[memoryview], first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        self._transfer("write", extent.offset, data)

    def _read(self, extent: Extent, into: Sequence[memoryview], then: Callable[[], None] | None) -> None:
        self._transfer("read", extent.offset, into)
        if then is not None:
            then()

    def _transfer(self, verb: Literal["write", "read"], offset: int, data: Sequence[memoryview]) -> None:
        """Write or read ``data`` in chunks."""
        for part in (piece[start : start + CHUNK] for piece in data for start in range(0, len(piece), CHUNK)):
            buffer = self._buffer.view[: aligned(len(part))] if self.direct else part
            if buffer is not part and verb == "write":
                buffer[: len(part)] = part
            self._move(verb, offset, buffer)
            offset += len(part)
            if buffer is not part and verb == "read":
                part[:] = buffer[: len(part)]

    def _move(self, verb: Literal["write", "read"], offset: int, data: memoryview) -> None:
        """Call until all bytes are moved, because one call may move fewer."""
        call, done = os.pwritev if verb == "write" else os.preadv, 0
        while done < len(data):
            direct = self.direct
            try:
                moved = call(self._file, [data[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._set_direct(False)
                    continue
                raise self._error(f"cannot {verb} {len(data) - done} bytes", error, offset + done) from error
            if moved <= 0:
                short = f"short {verb}: {done} of {len(data)} bytes, then nothing"
                remedy = "look for errors of the disk in the system's log (dmesg), or set another directory"
                raise self._error(f"{short}: {remedy}", offset=offset + done)
            done += moved
            if direct and done % ALIGNMENT:  # the next call would not be aligned
                self._set_direct(False)

    def _open(self, direct: bool) -> None:
        """Open a file without a name (``O_TMPFILE``), or one that is unlinked at once."""
        try:
            with tempfile.TemporaryFile(prefix="lt_tiled-", dir=self.directory, buffering=0) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            with suppress(OSError, TypeError):
                os.unlink(error.filename)  # a filesystem that does not unlink open files
            reason = "cannot create the spill file (set a directory that exists and is writable)"
            raise self._error(reason, error) from error
        with suppress(OSError):  # the filesystem does not support the flag
            self._set_direct(direct)

    def _set_direct(self, direct: bool) -> None:
        """Set or clear ``O_DIRECT``, which some filesystems reject at once and some in the first call."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        self.direct = direct

    def _error(self, reason: str, cause: OSError | None = None, offset: int | None = None) -> OffloadError:
        kind = OffloadError
        if cause is not None and cause.errno in _NO_ROOM:
            kind = OffloadDiskFullError
            reason = f"{reason}{self._where_and_remedy(cause.errno)}"
        if cause is not None:
            reason = f"{reason}: {cause.strerror or cause}"
        return kind(reason, offset=offset, directory=self.directory)

    def _where_and_remedy(self, code: int) -> str:
        """Return what an error about missing room says about the disk."""
        if code == errno.EFBIG:
            remedy = "raise the limit on the size of files (ulimit -f), set another directory, or lower disk_budget"
            return f" in a file of {gib(self._extents.size)}: {remedy}"
        where = ""
        with suppress(OSError):
            disk = os.statvfs(self.directory)
            where = f" on a disk with {gib(disk.f_bavail * disk.f_frsize)} free"
        return f"{where}: set another directory, lower disk_budget, or delete files there"

    def close(self) -> None:
        """Cancel waiting calls, let running ones end, and free the disk space. Does not raise."""
        self._threads.shutdown(cancel_futures=True)
        self._close()


def wait_for(call: Future[None]) -> None:
    """Wait until a call has ended, and raise its error."""
    if (error := call.exception()) is not None:
        # A copy: the call's own error would refer to this traceback, and so would keep the step's graph alive.
        raise copy(error) from error.__cause__


def _close_file(file: int, directory: str, process: int) -> None:
    if os.getpid() == process:  # a fork shares the file
        with suppress(OSError):
            os.ftruncate(file, 0)  # workers of a DataLoader that were forked hold the file open too
    try:
        os.close(file)
    except OSError as error:  # of a network disk that is gone
        warn(f"Closing the spill file in {directory} failed: {error.strerror}. Its data is not needed.")
