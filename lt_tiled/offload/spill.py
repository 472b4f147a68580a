"""The spill file: one unlinked file per process, which the system deletes however the process ends."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Lock, local
from typing import Any, Literal

from lt_tiled._log import warn
from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.memory import gib
from lt_tiled.offload.extents import ALIGNMENT, Extents, aligned

CHUNK = 8 * 2**20
"""The bytes per system call, and of each thread's page-aligned buffer."""
GROWTH = 256 * 2**20
"""A file without a budget grows by at least this many bytes at a time."""
THREADS = 2
CLOSE_SECONDS = 30.0
"""The longest time that closing waits for running calls."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)  # filesystems and kernels without O_TMPFILE


class SpillFile:
    """Raw bytes at aligned offsets of an unlinked file, which two threads write and read.

    The file has mode 0600 and no name: it is created in a directory of its own, which is removed at once. Space is
    reserved before it is written. Nothing is synced, because the data has no use after a crash.

    Args:
        directory: An existing directory on the disk to use.
        budget: The bytes to reserve now and never exceed; ``None`` reserves space as the file grows.
        direct: Bypass the page cache if the filesystem supports it.
        checksum: Keep a CRC-32 of each range in memory and compare it when the range is read.

    Raises:
        OffloadDiskFullError: If the disk has no room for the budget.
        OffloadError: If the directory does not exist or is not writable.
    """

    def __init__(
        self, directory: str | Path, budget: int | None = None, *, direct: bool = True, checksum: bool = False
    ) -> None:
        self.directory = str(directory)
        self.budget = None if budget is None else aligned(budget)
        self._checksum = checksum
        self._sums: dict[int, int] = {}
        self._extents = Extents()
        self._lock = Lock()
        # Finalizers free ranges and may run while this thread holds the lock, so they only append here.
        self._freed: deque[tuple[int, int]] = deque()
        self._buffers = local()
        self._file = self._open()
        self._close_file = weakref.finalize(self, os.close, self._file)
        self.direct = False
        with suppress(OSError):  # the filesystem does not support the flag
            self._set_direct(direct)
        self._running: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lt_tiled-spill")
        try:
            if self.budget is not None:
                self._grow(self.budget)
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int) -> int:
        """Reserve a range and return its offset.

        Raises:
            OffloadDiskFullError: If the file cannot hold it and cannot grow.
        """
        need = aligned(nbytes)
        with self._lock:
            self._collect()
            while (offset := self._extents.take(need)) is None:
                if self.budget is not None:
                    raise OffloadDiskFullError(
                        f"the disk budget of {self.budget} bytes has no free range of {need} bytes"
                        f" ({self._extents.used} are in use): raise disk_budget",
                        directory=self.directory,
                    )
                self._grow(max(need - self._extents.tail, GROWTH), at_least=need - self._extents.tail)
            return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free a range that is no longer written or read."""
        self._freed.append((offset, aligned(nbytes)))

    @property
    def used(self) -> int:
        """The number of bytes in use."""
        with self._lock:
            self._collect()
            return self._extents.used

    def _collect(self) -> None:
        while self._freed:
            offset, nbytes = self._freed.popleft()
            self._sums.pop(offset, None)
            self._extents.give_back(offset, nbytes)

    def _grow(self, nbytes: int, at_least: int | None = None) -> None:
        try:
            os.posix_fallocate(self._file, self._extents.size, nbytes)
        except OSError as error:
            if error.errno in _NO_ROOM and at_least is not None and at_least < nbytes:
                return self._grow(at_least)
            free = gib(shutil.disk_usage(self.directory).free)
            reason = (
                f"cannot reserve {gib(nbytes)} more on a disk with {free} free: set another directory, lower"
                " disk_budget, or delete files there"
            )
            raise self._error(reason, error) from error
        return self._extents.grow(nbytes)

    def write(self, offset: int, data: memoryview, first: Callable[[], None] | None = None) -> Future[None]:
        """Begin to call ``first`` and then write a range. ``data`` must not change until the future is done."""
        return self._submit(self._write, offset, data, first)

    def read(self, offset: int, into: memoryview, then: Callable[[], None] | None = None) -> Future[None]:
        """Begin to read a range of the length of ``into`` and then call ``then``."""
        return self._submit(self._read, offset, into, then)

    def _submit(self, run: Callable[..., None], *args: Any) -> Future[None]:
        try:
            future = self._threads.submit(run, *args)
        except RuntimeError as error:
            raise self._error("the spill file is closed") from error
        self._running.add(future)
        return future

    def _write(self, offset: int, data: memoryview, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        self._sums[offset] = self._transfer("write", offset, data)

    def _read(self, offset: int, into: memoryview, then: Callable[[], None] | None) -> None:
        total = self._transfer("read", offset, into)
        if (written := self._sums.get(offset, 0)) != total:
            sums = f"the data read has checksum {total:08x}, not {written:08x} as written"
            raise self._error(f"{sums}: the disk or the memory is faulty", offset=offset)
        if then is not None:
            then()

    def _transfer(self, verb: Literal["write", "read"], offset: int, data: memoryview) -> int:
        """Write or read ``data`` in chunks, and return its checksum, 0 without ``checksum``."""
        total = 0
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            buffer = self._buffer(len(part)) if self.direct else part
            if buffer is not part and verb == "write":
                buffer[: len(part)] = part
            self._move(verb, offset + start, buffer)
            if buffer is not part and verb == "read":
                part[:] = buffer[: len(part)]
            total = zlib.crc32(part, total) if self._checksum else 0
        return total

    def _move(self, verb: Literal["write", "read"], offset: int, data: memoryview) -> None:
        """Call until all bytes are moved, because one call may move fewer."""
        call, done = os.pwritev if verb == "write" else os.preadv, 0
        while done < len(data):
            direct = self.direct
            try:
                moved = call(self._file, [data[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._set_direct(False)
                    continue
                raise self._error(f"cannot {verb} {len(data) - done} bytes", error, offset + done) from error
            if moved <= 0:
                raise self._error(f"short {verb}: {done} of {len(data)} bytes, then nothing", offset=offset + done)
            if direct and done + moved < len(data):  # the next call must be aligned too
                moved -= moved % ALIGNMENT
                if not moved:
                    self._set_direct(False)
            done += moved

    def _buffer(self, nbytes: int) -> memoryview:
        """Return ``nbytes``, rounded up to the alignment, of this thread's page-aligned buffer."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap.mmap(-1, CHUNK))
        view: memoryview = self._buffers.view
        return view[: aligned(nbytes)]

    def _open(self) -> int:
        try:
            private = tempfile.mkdtemp(prefix="lt_tiled-", dir=self.directory)  # mode 0700
            try:
                return _open_unlinked(private)
            finally:
                os.rmdir(private)
        except OSError as error:
            reason = "cannot create the spill file (set a directory that exists and is writable)"
            raise self._error(reason, error) from error

    def _set_direct(self, direct: bool) -> None:
        """Set or clear ``O_DIRECT``, which some filesystems reject at once and some in the first call."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        self.direct = direct

    def _error(self, reason: str, cause: OSError | None = None, offset: int | None = None) -> OffloadError:
        kind = OffloadDiskFullError if cause is not None and cause.errno in _NO_ROOM else OffloadError
        if cause is not None:
            reason = f"{reason}: {cause.strerror or cause}"
        return kind(reason, offset=offset, directory=self.directory)

    def close(self) -> None:
        """Cancel waiting calls, let running ones end, and free the disk space.

        If a call does not end within :data:`CLOSE_SECONDS`, the file stays open, with a warning.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        if wait([future for future in self._running if not future.done()], CLOSE_SECONDS).not_done:
            late = f"The disk of {self.directory} has not responded for {CLOSE_SECONDS:g} s"
            warn(f"{late}: its spill file stays open until it does.")
            return
        self._threads.shutdown(wait=True)
        self._close_file()


def _open_unlinked(folder: str) -> int:
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    path = os.path.join(folder, "spill")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(path)
    return file
