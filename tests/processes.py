"""The processes that tests start, and how long to wait for them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 900
"""Seconds that a wait may take. A machine under load stays below it; a hang reaches it and fails the test."""
RUN = "LT_TILED_TEST_RUN"
"""The environment variable by which the processes that a test's process starts are found: they inherit its token."""


def alive(token: str) -> list[int]:
    """Return the ids of the processes that inherited a token, zombies excluded."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if token.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill(token: str) -> None:
    """Kill the processes that inherited a token, and those that they start meanwhile."""
    while found := alive(token):
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
