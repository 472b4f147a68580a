"""A shell in which documents' commands run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.documents import ROOT
from tests.docs.shim import COMMANDS, WARM
from tests.processes import LIMIT

Shell = Callable[[Path], str]


@pytest.fixture(scope="session")
def _commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which the commands of documents are found, limited, and start at once."""
    folder = tmp_path_factory.mktemp("docs")
    address = str(folder / "warm")
    for name in COMMANDS:
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        program = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.docs.shim import main; main()"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" {name} "$@"\n')
        command.chmod(0o755)
    # On the CPU and with one thread for each rank, as everywhere in the tests; a wide terminal, to read what is
    # printed.
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", WARM: address}
    environment = {**os.environ, **settings, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    warm = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.warm", address], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL
    )
    end = time.monotonic() + LIMIT
    while not Path(address).exists():
        assert warm.poll() is None, "the process that runs the commands has ended"
        assert time.monotonic() < end, f"the process that runs the commands has not started within {LIMIT} s"
        time.sleep(0.05)
    yield environment
    warm.kill()
    warm.wait()


@pytest.fixture
def shell(_commands: dict[str, str]) -> Shell:
    """Runs a script of bash in the test's folder, and returns what it prints; its first failing command fails the
    test.
    """

    def run(script: Path) -> str:
        done = subprocess.run(
            ["/bin/bash", str(script)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=_commands,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        return printed

    return run
