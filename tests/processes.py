"""Scripts that tests start as users do, with ranks of their own: every wait has a limit, and nothing is left of
them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def start(*command: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """On one thread for each rank, with the repository on its path, in a session of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=both, text=True, start_new_session=True
    )


def finish(runs: Sequence[subprocess.Popen[str]], limit: float) -> tuple[list[int], list[str]]:
    """Exit codes and what each printed; whatever is left of the runs after the limit, in seconds, their children too,
    is killed.
    """
    try:
        printed = [run.communicate(timeout=limit)[0] for run in runs]
    finally:
        for run in runs:
            try:
                os.killpg(run.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return [run.returncode for run in runs], printed
