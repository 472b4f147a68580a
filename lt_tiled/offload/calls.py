"""System calls on threads of their own, because a disk that no longer responds never returns from one."""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Callable
from copy import copy
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread, current_thread

from lt_tiled._log import warn
from lt_tiled.errors import OffloadError

THREADS = 2
CLOSED = "the spill file is closed"
CLOSE_SECONDS = 30.0
"""The longest time that closing waits for running calls."""


class SystemCall:
    """A queued, running or finished system call. It drops its references before it is marked as done.

    Errors name it by ``what``, the directory of its file and its offset there. It is no ``Future``, because Ctrl-C
    inside of one may leave its lock locked, for which the thread would wait without end.
    """

    def __init__(self, run: Callable[[], None], what: str, directory: str, offset: int | None = None) -> None:
        self._run: Callable[[], None] | None = run
        self.what, self.directory, self.offset = what, directory, offset
        self.done = False
        self.error: BaseException | None = None
        self._ended = Lock()
        self._ended.acquire()

    def run(self, closed: bool) -> None:
        """Make the call, on one of the threads, unless its file was ``closed``."""
        run, self._run = self._run, None
        try:
            if closed or run is None:
                raise OffloadError(CLOSED, directory=self.directory)
            run()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the range and to its data
            self.error = error
        del run
        self.done = True
        self._ended.release()

    def ended_within(self, seconds: float) -> bool:
        """Wait until it has ended, at most so long; return whether it has."""
        if not self.done and self._ended.acquire(timeout=seconds):
            self._ended.release()
        return self.done

    def wait(self, seconds: float) -> None:
        """Wait until it has ended. Raise :class:`OffloadError` if it failed, or has not ended within ``seconds``."""
        if not self.ended_within(seconds):
            late = f"{self.what} has not ended within {seconds:g} s"
            raise OffloadError(late, offset=self.offset, directory=self.directory)
        if self.error is not None:
            # A copy: the call's own error would refer to this traceback, and so would keep the step's graph alive.
            raise copy(self.error) from self.error.__cause__


class CallThreads:
    """Threads that make system calls on a file in order. The process ends without those that are stuck in one."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.at_end: Callable[[], None] | None = None
        """What the last thread does before it ends."""
        self.closed = False
        self.pending: weakref.WeakSet[SystemCall] = weakref.WeakSet()
        self._queue: SimpleQueue[SystemCall | None] = SimpleQueue()
        self._ended = count(1)
        # Python waits for threads at its end unless they are daemons, those of a ThreadPoolExecutor included.
        self._threads = [Thread(target=self._work, name="lt_tiled-spill", daemon=True) for _ in range(THREADS)]

    def start(self) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            reason = f"cannot start the {THREADS} threads that write and read: {error}. Raise the limit on"
            reason += " processes (ulimit -u, or pids.max of the container), or end some"
            raise OffloadError(reason, directory=self.directory) from error

    def submit(self, run: Callable[[], None], what: str, offset: int | None = None) -> SystemCall:
        if self.closed:
            raise OffloadError(CLOSED, directory=self.directory)
        call = SystemCall(run, what, self.directory, offset)
        self._queue.put(call)  # first: nothing may wait for a call that no thread will see
        self.pending.add(call)
        return call

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run(self.closed)
            del call
        if next(self._ended) == THREADS and self.at_end is not None:
            self.at_end()

    def close(self) -> None:
        """Cancel the calls that wait, and let the others end. Threads that are stuck stay, with a warning."""
        self.closed = True
        others = [thread for thread in self._threads if thread.ident and thread is not current_thread()]
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + CLOSE_SECONDS
        for thread in others:
            thread.join(max(end - time.monotonic(), 0))
        if any(thread.is_alive() for thread in others):
            late = f"The disk of {self.directory} has not responded for {CLOSE_SECONDS:g} s"
            warn(f"{late}: its spill file stays open until it does. The process can still exit.")
