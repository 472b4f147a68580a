"""A process that has imported the package and runs each command in a child: the imports take seconds, and a child has
them at once.

Run ``python -m tests.docs.warm ADDRESS``; :func:`request` asks it to run something.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def request(address: str, command: list[str]) -> int:
    """Let the process run ``python`` or ``lt-tiled`` with these arguments, here and with this process's environment and
    streams.

    Returns:
        The exit status.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        text = json.dumps({"cwd": os.getcwd(), "environment": dict(os.environ), "command": command}).encode()
        streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        connection.sendmsg([len(text).to_bytes(4, "big")], streams)
        connection.sendall(text)
        answer = connection.recv(1)
        return answer[0] if answer else 1


def _serve(address: str) -> list[str]:
    """Fork for each request. Returns only in a child, with its command."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()  # who asks before all is imported waits

    import transformers.models.llama.modeling_llama  # noqa: F401

    import lt_tiled.cli

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        lt_tiled.cli.main(
            ["fit", "--model=CausalLM", "--data=TextFiles", "--trainer.strategy.help=TiledDDPStrategy"]
        )  # fills caches
    gc.freeze()  # else the first collection in a child copies all memory
    while True:
        connection, _ = server.accept()
        length, streams, _, _ = socket.recv_fds(connection, 4, 3)
        text = b""
        while length and len(text) < int.from_bytes(length, "big"):
            text += connection.recv(2**16)
        if not length:
            continue
        child = os.fork()
        if not child:
            os.setsid()
            server.close()
            connection.close()
            return _become(json.loads(text), streams)
        for stream in streams:
            os.close(stream)
        connection.sendall(bytes([_status(connection, child)]))
        connection.close()


def _become(asked: dict[str, object], streams: list[int]) -> list[str]:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["environment"])  # type: ignore[call-overload]
    command: list[str] = asked["command"]  # type: ignore[assignment]
    return command


def _status(connection: socket.socket, child: int) -> int:
    """Of the child when it ends; it is killed when nobody waits for it any more."""
    watch = os.pidfd_open(child)
    ready: list[object] = select.select([connection, watch], [], [])[0]  # type: ignore[type-var]
    if watch not in ready:
        os.killpg(child, signal.SIGKILL)
    os.close(watch)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


def _run(kind: str, *args: str) -> None:
    """What the interpreter, or the installed command, does with these arguments."""
    if kind == "lt-tiled":
        import lt_tiled.cli

        command = Path(sys.executable).with_name("lt-tiled")
        sys.argv, sys.path[0] = [str(command), *args], str(command.parent)
        sys.modules["__main__"] = ModuleType("__main__")
        lt_tiled.cli.main()
    elif args[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *args[2:]], os.getcwd()
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(args), str(Path(args[0]).absolute().parent)
        runpy.run_path(args[0], run_name="__main__")


def _end(status: int) -> NoReturn:
    """End as the interpreter does, without taking all that was imported apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    command = _serve(sys.argv[1])
    try:
        _run(*command)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)
