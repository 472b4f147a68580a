"""Start scripts as users do, and end every process of a run of the tests, however the run ends."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 900
"""Seconds that a wait may take. A machine under load stays below it; a hang reaches it and fails the test."""
RUNS = "LT_TILED_TEST_RUNS"
"""The environment variable that processes inherit: the tokens of the runs that started them, outermost first."""


class Script(subprocess.Popen[str]):
    """A command with the repository on its path, and a session of its own."""

    def __init__(self, *command: str, cwd: Path | None = None, **env: str) -> None:
        self.token = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        environment[RUNS] = os.environ.get(RUNS, "") + self.token
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        super().__init__(command, cwd=cwd, env=environment, stdout=pipe, stderr=both, text=True, start_new_session=True)


def alive(token: str) -> list[int]:
    """Return the ids of the other processes that inherited a token, zombies excluded."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if token.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def kill(token: str) -> None:
    """Kill the processes that inherited a token, and those that they start meanwhile."""
    while found := alive(token):
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


@functools.cache
def guard() -> subprocess.Popen[bytes]:
    """Start a process that kills all descendants of this process when this process ends, even by SIGKILL."""
    token = uuid.uuid4().hex
    command = [sys.executable, "-IS", __file__, str(os.getpid()), token]
    quiet = subprocess.DEVNULL
    guardian = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    os.environ[RUNS] = os.environ.get(RUNS, "") + token
    return guardian


if __name__ == "__main__":
    parent, inherited = int(sys.argv[1]), sys.argv[2]
    while os.getppid() == parent:
        time.sleep(0.1)
    kill(inherited)
