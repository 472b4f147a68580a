"""The spill file: one unlinked file per process, which the system deletes however the process ends."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import Literal

from lt_tiled._log import warn
from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.memory import gib
from lt_tiled.offload.calls import CallThreads, SystemCall
from lt_tiled.offload.extents import ALIGNMENT, Extent, Extents, aligned

try:
    from xxhash import xxh3_64_intdigest as _digest
except ImportError:  # machines with torch, Lightning and transformers alone, as offline images, lack xxhash
    from zlib import crc32 as _digest  # type: ignore[assignment]

CHUNK = 8 * 2**20
"""The bytes per system call, and of each thread's page-aligned buffer."""
PIECE = 2**20
"""The checksum is computed over blocks of this many bytes, so it does not depend on how data is split into pieces
(multiples of it)."""
WAIT_SECONDS = 300.0
"""No wait for the disk is longer than this."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Buffer(local):
    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, CHUNK))


class SpillFile:
    """Raw bytes at aligned offsets of an unlinked file, which two threads write and read.

    The file has mode 0600 and no name. Space is reserved before it is written. Nothing is synced, because the data has
    no use after a crash. Only the threads make system calls on the file, and the last one closes it.

    Args:
        directory: An existing directory on the disk to use.
        budget: The bytes to reserve now and never exceed; ``None`` reserves space as the file grows.
        direct: Bypass the page cache if the filesystem supports it.
        checksum: Keep a checksum of each range in memory and compare it when the range is read.
    """

    def __init__(
        self, directory: str | Path, budget: int | None = None, *, direct: bool = True, checksum: bool = False
    ) -> None:
        self.directory = str(directory)
        self.budget = None if budget is None else aligned(budget)
        self.direct = False
        self._checksum = checksum
        self._extents = Extents()
        self._growing = Lock()
        self._buffer = _Buffer()
        self._threads = CallThreads(self.directory)
        self._close = weakref.finalize(self, self._threads.close)  # also when the process ends
        try:
            self._threads.start()
            self._threads.submit(partial(self._open, direct), "the creation of the spill file").wait(WAIT_SECONDS)
            if self.budget is not None:
                self._grow(self.budget)
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int) -> Extent:
        """Reserve a range, which is free again when nothing refers to it."""
        need, collected = aligned(nbytes), False
        while (extent := self._take(need)) is None:
            if self._wait_for_a_call():
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

    def _wait_for_a_call(self) -> bool:
        """Wait for a running call, which may free a range; return whether there was one."""
        running = [call for call in list(self._threads.pending) if not call.done]
        if running and not running[0].ended_within(WAIT_SECONDS):
            raise self._error(f"the disk has not responded for {WAIT_SECONDS:g} s")
        return bool(running)

    @property
    def used(self) -> int:
        return self._extents.used

    def _grow(self, nbytes: int) -> None:
        self._threads.submit(partial(self._reserve, nbytes), f"reserving {gib(nbytes)}").wait(WAIT_SECONDS)

    def _reserve(self, nbytes: int) -> None:
        with self._growing:  # an earlier one may still run, after Ctrl-C
            try:
                os.posix_fallocate(self._file, self._extents.size, nbytes)
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(self._file, self._extents.size)  # ext4 keeps what it reserved before it failed
                raise self._error(f"cannot reserve {gib(nbytes)} more", error) from error
            self._extents.size += nbytes

    def write(self, extent: Extent, data: Sequence[memoryview], first: Callable[[], None] | None = None) -> SystemCall:
        """Begin to call ``first`` and then write a range. ``data`` must not change until the call has ended.

        All pieces of the data but the last have a multiple of :data:`PIECE` bytes.
        """
        return self._submit("write", partial(self._write, extent, data, first), extent, data)

    def read(self, extent: Extent, into: Sequence[memoryview], then: Callable[[], None] | None = None) -> SystemCall:
        """Begin to read a range of the length of ``into``, whose pieces are as in :meth:`write`, then call ``then``."""
        return self._submit("read", partial(self._read, extent, into, then), extent, into)

    def _submit(self, verb: str, run: Callable[[], None], extent: Extent, data: Sequence[memoryview]) -> SystemCall:
        return self._threads.submit(run, f"the {verb} of {sum(map(len, data))} bytes", extent.offset)

    def _write(self, extent: Extent, data: Sequence[memoryview], first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        extent.checksum = self._transfer("write", extent.offset, data)

    def _read(self, extent: Extent, into: Sequence[memoryview], then: Callable[[], None] | None) -> None:
        if (total := self._transfer("read", extent.offset, into)) != extent.checksum:
            sums = f"the data read has checksum {total:x}, not {extent.checksum:x} as written"
            raise self._error(f"{sums}: the disk or the memory is faulty", offset=extent.offset)
        if then is not None:
            then()

    def _transfer(self, verb: Literal["write", "read"], offset: int, data: Sequence[memoryview]) -> int:
        """Write or read ``data`` in chunks, and return its checksum, 0 without ``checksum``."""
        total = 0
        for part in (piece[start : start + CHUNK] for piece in data for start in range(0, len(piece), CHUNK)):
            buffer = self._buffer.view[: aligned(len(part))] if self.direct else part
            if buffer is not part and verb == "write":
                buffer[: len(part)] = part
            self._move(verb, offset, buffer)
            offset += len(part)
            if buffer is not part and verb == "read":
                part[:] = buffer[: len(part)]
            for at in range(0, len(part) if self._checksum else 0, PIECE):
                total = _digest(part[at : at + PIECE], total)
        return total

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
        self._threads.at_end = partial(_close_file, self._file, self.directory)
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
        """Cancel waiting calls, let running ones end, and free the disk space. Does not raise.

        If a call does not end within :data:`CLOSE_SECONDS`, the file stays open, with a warning.
        """
        self._threads.close()
        self._close.detach()


def _close_file(file: int, directory: str) -> None:
    with suppress(OSError):
        os.ftruncate(file, 0)  # workers of a DataLoader that were forked hold the file open too
    try:
        os.close(file)
    except OSError as error:  # of a network disk that is gone
        warn(f"Closing the spill file in {directory} failed: {error.strerror}. Its data is not needed.")
