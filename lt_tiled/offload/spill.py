"""The spill file: one unlinked file per process, which the system deletes however the process ends."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, local
from typing import Any, Literal

from lt_tiled._log import warn
from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.memory import gib
from lt_tiled.offload.extents import ALIGNMENT, Extent, Extents, aligned

try:
    from xxhash import xxh3_64_intdigest as _digest
except ImportError:  # machines with torch, Lightning and transformers alone, as offline images, lack xxhash
    from zlib import crc32 as _digest  # type: ignore[assignment]

CHUNK = 8 * 2**20
"""The bytes per system call, and of each thread's page-aligned buffer."""
PIECE = 2**20
"""Data may be in pieces of multiples of this, which do not change its checksum: that is made of so many bytes each."""
GROWTH = 256 * 2**20
"""A file without a budget grows by at least this many bytes at a time."""
THREADS = 2
WAIT_SECONDS = 300.0
"""No wait for the disk is longer than this."""
CLOSE_SECONDS = 30.0
"""The longest time that closing waits for running calls."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Call:
    """A system call that waits for a thread, runs, or has ended. What it refers to is dropped before it has ended.

    Ctrl-C inside of a ``Future`` may leave its lock locked, for which the thread would wait without end.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = [_cancelled, run]  # whoever takes the last entry out, atomically, decides
        self.done = False
        self.error: BaseException | None = None
        self._ended = Lock()
        self._ended.acquire()

    def run(self) -> None:
        try:
            self._run.pop()()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the range and to its data
            self.error = error
        self.done = True
        self._ended.release()

    def cancel(self) -> None:
        """Do not run it, unless it has begun."""
        del self._run[1:]

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; return whether it has."""
        if not self.done and self._ended.acquire(timeout=seconds):
            self._ended.release()
        return self.done


def _cancelled() -> None:
    raise OffloadError("the spill file is closed")


class _Calls:
    """Threads that make the system calls of a spill file. The process ends without those that are stuck in a call.

    Raises:
        OffloadError: If the threads cannot be started.
    """

    def __init__(self, directory: str) -> None:
        self.directory, self.process = directory, os.getpid()
        self.file: int | None = None
        self.closed = False
        self.pending: weakref.WeakSet[Call] = weakref.WeakSet()
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._ended, self._lock = 0, Lock()
        self._threads: list[Thread] = []
        try:
            for _ in range(THREADS):
                # Python waits for threads at its end unless they are daemons, those of a ThreadPoolExecutor included.
                self._threads.append(Thread(target=self._work, name="lt_tiled-spill", daemon=True))
                self._threads[-1].start()
        except BaseException as error:
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            reason = f"cannot start the {THREADS} threads that write and read: {error}. Raise the limit on"
            reason += " processes (ulimit -u, or pids.max of the container), or end some"
            raise OffloadError(reason, directory=directory) from error

    def submit(self, run: Callable[..., None], *args: Any) -> Call:
        call = Call(partial(run, *args))
        self._queue.put(call)  # first: nothing may wait for a call that no thread will see
        self.pending.add(call)
        return call

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()
            del call
        with self._lock:
            self._ended += 1
            last = self._ended == THREADS
        if last and self.file is not None:
            with suppress(OSError):
                os.ftruncate(self.file, 0)  # workers of a DataLoader that were forked hold the file open too
            try:
                os.close(self.file)
            except OSError as error:  # of a network disk that is gone
                warn(f"Closing the spill file in {self.directory} failed: {error.strerror}. Its data is not needed.")

    def close(self) -> None:
        """Cancel the calls that wait, let the others end, and close the file; with a warning, leave those stuck."""
        if os.getpid() != self.process:  # a fork has none of the threads
            return
        self.closed = True
        for call in list(self.pending):
            call.cancel()
        others = [thread for thread in self._threads if thread.ident and thread is not current_thread()]
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + CLOSE_SECONDS
        for thread in others:
            thread.join(max(end - time.monotonic(), 0))
        if any(thread.is_alive() for thread in others):
            late = f"The disk of {self.directory} has not responded for {CLOSE_SECONDS:g} s"
            warn(f"{late}: its spill file stays open until it does, or until the process ends, which does not wait.")


class SpillFile:
    """Raw bytes at aligned offsets of an unlinked file, which two threads write and read.

    The file has mode 0600 and no name. Space is reserved before it is written. Nothing is synced, because the data has
    no use after a crash.

    Args:
        directory: An existing directory on the disk to use.
        budget: The bytes to reserve now and never exceed; ``None`` reserves space as the file grows.
        direct: Bypass the page cache if the filesystem supports it.
        checksum: Keep a checksum of each range in memory and compare it when the range is read.

    Raises:
        OffloadDiskFullError: If the disk has no room for the budget.
        OffloadError: If the directory does not exist or is not writable, or no threads can be started.
    """

    def __init__(
        self, directory: str | Path, budget: int | None = None, *, direct: bool = True, checksum: bool = False
    ) -> None:
        self.directory = str(directory)
        self.budget = None if budget is None else aligned(budget)
        self.direct = False
        self._checksum = checksum
        self._extents = Extents()
        self._lock, self._growing = Lock(), Lock()
        self._buffers = local()
        self._calls = _Calls(self.directory)
        self._close = weakref.finalize(self, self._calls.close)  # also when the process ends
        try:
            self.wait(self._submit(self._open, direct), "the creation of the spill file")
            if self.budget is not None:
                self._grow(self.budget)
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int) -> Extent:
        """Reserve a range, which is free again when nothing refers to it.

        Raises:
            OffloadDiskFullError: If the file cannot hold it and cannot grow.
            OffloadError: If the disk does not respond.
        """
        need, collected = aligned(nbytes), False
        while True:
            with self._lock:
                if (extent := self._extents.take(need)) is not None:
                    return extent
                if self.budget is None:
                    more = need - self._extents.free_at_end()
                    if more > 0:  # a thread may have freed some since
                        self._grow(max(more, GROWTH), more)
            if self.budget is None or self._call_has_ended():
                continue
            if collected:
                raise OffloadDiskFullError(
                    f"the disk budget of {self.budget} bytes has no free range of {need} bytes"
                    f" ({self.used} are in use): raise disk_budget",
                    directory=self.directory,
                )
            gc.collect()  # errors leave graphs in reference cycles
            collected = True

    def _call_has_ended(self) -> bool:
        """Wait for a running call, which may free a range; return whether there was one."""
        running = [call for call in list(self._calls.pending) if not call.done]
        if running and not running[0].wait(WAIT_SECONDS):
            raise self._error(f"the disk has not responded for {WAIT_SECONDS:g} s")
        return bool(running)

    @property
    def used(self) -> int:
        """The number of bytes in use."""
        with self._lock:
            return self._extents.used

    def _grow(self, *choices: int) -> None:
        self.wait(self._submit(self._reserve, *choices), f"reserving {gib(choices[0])}")

    def _reserve(self, *choices: int) -> None:
        """Reserve the first of these numbers of bytes for which there is room."""
        with self._growing:  # an earlier one may still run, after Ctrl-C
            for nbytes in choices:
                try:
                    os.posix_fallocate(self._file, self._extents.size, nbytes)
                except OSError as error:
                    with suppress(OSError):
                        os.ftruncate(self._file, self._extents.size)  # ext4 keeps what it reserved before it failed
                    if nbytes == choices[-1] or error.errno not in _NO_ROOM:
                        raise self._no_room(nbytes, error) from error
                else:
                    self._extents.size += nbytes
                    return

    def _no_room(self, nbytes: int, error: OSError) -> OffloadError:
        where, remedy = "", "set another directory, lower disk_budget, or delete files there"
        with suppress(OSError):
            disk = os.fstatvfs(self._file)
            where = f" on a disk with {gib(disk.f_bavail * disk.f_frsize)} free"
        if error.errno == errno.EFBIG:
            where = f" in a file of {gib(self._extents.size)}"
            remedy = "raise the limit on the size of files (ulimit -f), set another directory, or lower disk_budget"
        return self._error(f"cannot reserve {gib(nbytes)} more{where}: {remedy}", error)

    def write(self, extent: Extent, *data: memoryview, first: Callable[[], None] | None = None) -> Call:
        """Begin to call ``first`` and then write a range. ``data`` must not change until the call has ended.

        All pieces of the data but the last have a multiple of :data:`PIECE` bytes.
        """
        return self._submit(self._write, extent, data, first)

    def read(self, extent: Extent, *into: memoryview, then: Callable[[], None] | None = None) -> Call:
        """Begin to read a range of the length of ``into``, whose pieces are as in :meth:`write`, then call ``then``."""
        return self._submit(self._read, extent, into, then)

    def _submit(self, run: Callable[..., None], *args: Any) -> Call:
        if self._calls.closed:
            raise self._error("the spill file is closed")
        return self._calls.submit(run, *args)

    def wait(self, call: Call, what: str, seconds: float | None = None, offset: int | None = None) -> None:
        """Wait until a call has ended.

        Raises:
            OffloadError: If it failed, or has not ended within ``seconds``.
        """
        seconds = WAIT_SECONDS if seconds is None else seconds
        if not call.wait(seconds):
            raise self._error(f"{what} has not ended within {seconds:g} s", offset=offset)
        if call.error is not None:
            # A copy: the call's own error would refer to this traceback, and so would keep the step's graph alive.
            raise copy(call.error) from call.error.__cause__

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
            buffer = self._buffer(len(part)) if self.direct else part
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

    def _open(self, direct: bool) -> None:
        """Open a file without a name (``O_TMPFILE``), or one that is unlinked at once."""
        try:
            with tempfile.TemporaryFile(prefix="lt_tiled-", dir=self.directory, buffering=0) as file:
                self._calls.file = self._file = os.dup(file.fileno())
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
        kind = OffloadDiskFullError if cause is not None and cause.errno in _NO_ROOM else OffloadError
        if cause is not None:
            reason = f"{reason}: {cause.strerror or cause}"
        return kind(reason, offset=offset, directory=self.directory)

    def close(self) -> None:
        """Cancel waiting calls, let running ones end, and free the disk space. Does not raise.

        If a call does not end within :data:`CLOSE_SECONDS`, the file stays open, with a warning.
        """
        self._calls.close()
        self._close.detach()
