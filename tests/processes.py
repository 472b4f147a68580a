"""The processes that tests start, and how long to wait for them.

They are forks of one server per session, which imports the packages once for all of them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
LIMIT = 900
"""Seconds that a wait may take. A machine under load stays below it; a hang reaches it and fails the test."""
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(
    # DeepSpeed's engines import torch's inductor.
    ["lt_tiled.cli", "transformers.models.llama.modeling_llama", "deepspeed", "torch._inductor.compile_fx", "peft"]
)


class Forked:
    """``python`` or ``lt-tiled`` with arguments, as a user starts it but for the imports, in a fork of the server.

    What it prints is appended to a file. The processes that it starts itself, such as other ranks, are no forks, and
    inherit a token in their environment. With ``finalize`` it ends as an interpreter does, which runs ``atexit`` and
    destroys modules; else at once.
    """

    def __init__(self, *words: str, printed: Path, cwd: Path, finalize: bool = False, **env: str) -> None:
        self.token = uuid.uuid4().hex
        self.printed = printed
        env = {"PYTHONPATH": str(ROOT), "LT_TILED_TEST_RUN": self.token, **env}
        self.process = FORKS.Process(target=_become, args=(words, str(printed), str(cwd), finalize, env), daemon=True)
        self.process.start()

    def finish(self, with_children: bool = False) -> int | None:
        """Return the exit code, or ``None`` after a hang, of the process or ``with_children`` also of those that it
        started; kill what is left of them.
        """
        end = time.monotonic() + LIMIT
        self.process.join(LIMIT)
        code = self.process.exitcode
        while with_children and code is not None and self._alive():
            if time.monotonic() > end:
                code = None
            time.sleep(0.05)
        self.process.kill()
        while alive := self._alive():  # they may start others meanwhile
            for process in alive:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        return code

    def _alive(self) -> list[int]:
        """Return the ids of the processes that inherited the token, zombies excluded."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if self.token.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found


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
