"""Processes that are forks of one server per session, which imports the packages once for all of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType

from tests.processes import LIMIT, ROOT, RUN, alive, kill

FORKS = mp.get_context("forkserver")
# DeepSpeed's engines import torch's inductor.
FORKS.set_forkserver_preload(
    [
        "lt_tiled.cli",
        "transformers.models.llama.modeling_llama",
        "deepspeed",
        "torch._inductor.compile_fx",
        "peft",
    ]
)


class Forked:
    """``python`` or ``lt-tiled`` with arguments, as a user starts it but for the imports, in a fork of the server.

    What it prints is appended to a file. The processes that it starts itself, such as other ranks, are no forks. With
    ``finalize`` it ends as an interpreter does, which runs ``atexit`` and destroys modules; else at once.
    """

    def __init__(self, *words: str, printed: Path, cwd: Path, finalize: bool = False, **env: str) -> None:
        self.token = uuid.uuid4().hex
        self.printed = printed
        env = {"PYTHONPATH": str(ROOT), RUN: self.token, **env}
        self.process = FORKS.Process(target=_become, args=(words, str(printed), str(cwd), finalize, env), daemon=True)
        self.process.start()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text."""
        end = time.monotonic() + LIMIT
        while not (self.printed.exists() and text in self.printed.read_text()):
            assert self.process.is_alive(), f"the process ended before it printed {text!r}"
            assert time.monotonic() < end
            time.sleep(0.01)

    def finish(self, with_children: bool = False) -> int | None:
        """Return the exit code, or ``None`` after a hang, of the process or ``with_children`` also of those that it
        started; kill what is left of them.
        """
        end = time.monotonic() + LIMIT
        self.process.join(LIMIT)
        code = self.process.exitcode
        while with_children and code is not None and alive(self.token):
            if time.monotonic() > end:
                code = None
            time.sleep(0.05)
        self.process.kill()
        kill(self.token)
        return code


def _become(words: tuple[str, ...], printed: str, cwd: str, finalize: bool, env: dict[str, str]) -> None:
    if finalize:
        os._exit = sys.exit  # the fork server ends a fork with os._exit, which skips atexit
    os.environ.update(env)
    os.chdir(cwd)
    file = os.open(printed, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    module = words[2] if words[:2] == ("python", "-m") else None
    sys.argv = list(words[2:] if module else words[1:])
    sys.path.insert(0, cwd)
    if words[0] == "lt-tiled":
        import lt_tiled.cli

        sys.argv = [str(Path(sys.executable).with_name("lt-tiled")), *words[1:]]
        sys.modules["__main__"] = ModuleType("__main__")  # Lightning starts other ranks by what is the main module
        lt_tiled.cli.main()
    elif module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
