"""The spill file: one file for each process that has no name, so that nothing of it is left, however the process
ends.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock, local
from typing import Any

from lt_tiled._log import warn
from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.offload.extents import ALIGNMENT, Extents, aligned

CHUNK = 8 * 2**20
"""Bytes that one system call moves, through a page-aligned buffer of each thread."""
GROWTH = 256 * 2**20
"""A file without a budget is extended by at least this much at a time."""
THREADS = 2
CLOSE_SECONDS = 30.0
"""How long closing waits for calls that run."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpillFile:
    """Raw bytes at aligned offsets of an unlinked file, written and read by a few threads.

    The file is opened with ``O_TMPFILE``, or made and unlinked at once where the filesystem has no such thing, with
    mode 0600 in a directory of its own with mode 0700, which is removed again while the file lives on. Space is
    reserved before it is written to. Nothing is ever synced: after a crash the data is worthless.

    Args:
        directory: A directory on the disk to use. It must exist.
        budget: Bytes reserved now, and no more later; ``None`` reserves as it grows.
        direct: Bypass the page cache where the filesystem allows it.
        checksum: Keep a CRC-32 of each range in memory and compare it when the range is read.

    Raises:
        OffloadDiskFullError: If the disk has no room for the budget.
        OffloadError: If the directory is missing, is no directory, or cannot be written to.
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
        # Ranges are given back by finalizers, which may run while this thread holds the lock: they only append.
        self._freed: deque[tuple[int, int]] = deque()
        self._buffers = local()
        self._process = os.getpid()
        self._file, self.direct = self._open(direct)
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._running: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lt_tiled-spill")
        try:
            if self.budget is not None:
                self._grow(self.budget)
        except BaseException:
            self.close()
            raise

    # Space

    def take(self, nbytes: int) -> int:
        """Reserve a range and return its offset.

        Raises:
            OffloadDiskFullError: If neither the file nor the disk has room for it.
        """
        need = aligned(nbytes)
        with self._lock:
            self._collect()
            offset = self._extents.take(need)
            if offset is None:
                if self.budget is not None:
                    raise OffloadDiskFullError(
                        f"the disk budget of {self.budget} bytes has no free range of {need} bytes ({self._extents.used} are in use):"
                        " raise disk_budget",
                        directory=self.directory,
                    )
                self._grow(max(need - self._extents.tail, GROWTH), at_least=need - self._extents.tail)
                offset = self._extents.take(need)
                assert offset is not None
            return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free a range that nothing writes or reads any more."""
        self._freed.append((offset, aligned(nbytes)))

    @property
    def used(self) -> int:
        """Bytes in use."""
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
            raise self._error(
                error, f"cannot reserve {nbytes} bytes more (make room, lower disk_budget, or give another directory)"
            ) from error
        return self._extents.grow(nbytes)

    # Data

    def write(self, offset: int, data: memoryview, first: Callable[[], None] | None = None) -> Future[None]:
        """Begin to write a range, after ``first`` has returned; ``data`` must not change until the future is done."""
        return self._submit(self._write, offset, data, first)

    def read(self, offset: int, into: memoryview, then: Callable[[], None] | None = None) -> Future[None]:
        """Begin to read a range, as long as ``into``, into it; the future is done when ``then`` has returned as
        well.
        """
        return self._submit(self._read, offset, into, then)

    def _submit(self, run: Callable[..., None], *args: Any) -> Future[None]:
        if os.getpid() != self._process:
            raise OffloadError("this process is a fork of the one that opened the spill file", directory=self.directory)
        try:
            future = self._threads.submit(run, *args)
        except RuntimeError as error:
            raise OffloadError("the spill file is closed", directory=self.directory) from error
        self._running.add(future)
        return future

    def _write(self, offset: int, data: memoryview, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        total = 0
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            if self._checksum:
                total = zlib.crc32(part, total)
            self._move(os.pwritev, "write", offset + start, self._aligned_copy(part) if self.direct else part)
        if self._checksum:
            self._sums[offset] = total

    def _read(self, offset: int, into: memoryview, then: Callable[[], None] | None) -> None:
        total = 0
        for start in range(0, len(into), CHUNK):
            part = into[start : start + CHUNK]
            buffer = self._buffer()[: aligned(len(part))] if self.direct else part
            self._move(os.preadv, "read", offset + start, buffer)
            if buffer is not part:
                part[:] = buffer[: len(part)]
            if self._checksum:
                total = zlib.crc32(part, total)
        if self._checksum and self._sums.get(offset) != total:
            raise OffloadError(
                f"the data read back has checksum {total:08x}, not {self._sums.get(offset, 0):08x} as written: disk or memory is faulty",
                offset=offset,
                directory=self.directory,
            )
        if then is not None:
            then()

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], verb: str, offset: int, data: memoryview
    ) -> None:
        """Call until all bytes are moved: a call may move fewer than it was asked to."""
        done = 0
        while done < len(data):
            direct = self.direct
            try:
                moved = call(self._file, [data[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._leave_direct()
                    continue
                raise self._error(error, f"cannot {verb} {len(data) - done} bytes", offset + done) from error
            if moved <= 0:
                raise OffloadError(
                    f"short {verb}: {done} of {len(data)} bytes, then nothing",
                    offset=offset + done,
                    directory=self.directory,
                )
            whole = moved if done + moved == len(data) else moved - moved % ALIGNMENT
            if direct and not whole:
                self._leave_direct()  # so small a part that no aligned call can go on from it
            done += whole if direct else moved

    def _aligned_copy(self, part: memoryview) -> memoryview:
        buffer = self._buffer()[: aligned(len(part))]
        buffer[: len(part)] = part
        return buffer

    def _buffer(self) -> memoryview:
        """This thread's page-aligned buffer of one chunk."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap.mmap(-1, CHUNK))
        view: memoryview = self._buffers.view
        return view

    # The file

    def _open(self, direct: bool) -> tuple[int, bool]:
        try:
            private = tempfile.mkdtemp(prefix="lt_tiled-", dir=self.directory)  # mode 0700
        except OSError as error:
            raise self._error(
                error, "cannot make a directory for the spill file (make the one that it is in, or give another)"
            ) from error
        try:
            folder = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                return self._open_in(folder, direct)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._error(error, "cannot open the spill file") from error
        finally:
            os.rmdir(private)

    @staticmethod
    def _open_in(folder: int, direct: bool) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CLOEXEC
        if direct and hasattr(os, "O_DIRECT"):
            try:
                return _open_unnamed(folder, flags | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:  # what a filesystem says that does not know the flag
                    raise
        return _open_unnamed(folder, flags), False

    def _leave_direct(self) -> None:
        """Some filesystems take the flag when the file is opened and refuse the first call."""
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))
        self.direct = False

    def _error(self, error: OSError, what: str, offset: int | None = None) -> OffloadError:
        kind = OffloadDiskFullError if error.errno in _NO_ROOM else OffloadError
        return kind(f"{what}: {error.strerror or error}", offset=offset, directory=self.directory)

    def close(self) -> None:
        """Drop what waits, let running calls end, and give the space back to the disk.

        A call that does not end within :data:`CLOSE_SECONDS` keeps the file open, with a warning.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        if wait([future for future in self._running if not future.done()], CLOSE_SECONDS).not_done:
            warn(
                f"The disk of {self.directory} has not answered for {CLOSE_SECONDS:g} s: its spill file stays open until it does."
            )
            return
        self._threads.shutdown(wait=True)
        self._close_file()


def _open_unnamed(folder: int, flags: int) -> int:
    try:
        return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (
            errno.EOPNOTSUPP,
            errno.EISDIR,
            errno.ENOENT,
        ):  # filesystems and kernels without O_TMPFILE
            raise
    file = os.open("spill", flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    os.unlink("spill", dir_fd=folder)
    return file
