"""Persistent worlds of gloo ranks: a session imports and starts a process group once, and replaces a failed world."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from tests.processes import FORKS, LIMIT

if TYPE_CHECKING:
    import pytest


class RanksFailed(AssertionError):
    """The tracebacks of the ranks that failed."""


class World:
    """Two or more ranks: ``world(fn, *args)`` runs ``fn(*args)`` on each and returns the results in rank order.

    ``fn`` is a function of a module, so that it can be pickled. The ranks find each other through a file and take no
    port. If a rank fails, the call raises the tracebacks of all ranks and kills them, because some may wait in a
    collective; the next call starts new ones.
    """

    self_checks = True
    """Whether jobs run the self-check of tiled modules, which takes longer than the steps of most tests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[Any] = []
        self._pipes: list[Any] = []

    def __call__(self, fn: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args, self.self_checks))
        return self._results(timeout)

    def _start(self) -> None:
        self._meeting = tempfile.TemporaryDirectory()  # it is there until another one takes its place
        for rank in range(self.size):
            ours, theirs = FORKS.Pipe()
            words = (rank, self.size, f"file://{self._meeting.name}/meeting", theirs)
            self._pipes.append(ours)
            self._ranks.append(FORKS.Process(target=_serve, args=words, daemon=True))
            self._ranks[-1].start()
        self._results(LIMIT)

    def _results(self, timeout: float) -> list[Any]:
        answers = dict.fromkeys(self._pipes, (False, f"no answer within {timeout} s"))
        missing, end = set(self._pipes), time.monotonic() + timeout
        while missing and (ready := wait(missing, max(0.0, end - time.monotonic()))):
            for pipe in ready:
                missing.remove(pipe)
                try:
                    answers[pipe] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[pipe] = (False, "the process died")
                if not answers[pipe][0]:
                    end = min(end, time.monotonic() + 5)  # the others may wait for the one that failed
        failures = [f"rank {rank}: {text}" for rank, (ended, text) in enumerate(answers.values()) if not ended]
        if failures:
            self.kill()
            raise RanksFailed("\n".join(failures))
        return [result for _, result in answers.values()]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join(LIMIT)
        self._ranks, self._pipes = [], []

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for rank in self._ranks:
            rank.join(10)
        self.kill()


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave out the self-checks of tiled modules in their first calls."""
    if "lt_tiled" not in sys.modules:  # nothing can be tiled; importing lt_tiled takes seconds
        yield
        return
    from lt_tiled.tiling import patch

    check, patch.check_position_wise = patch.check_position_wise, lambda *call: None
    try:
        yield
    finally:
        patch.check_position_wise = check


def remember_entry_points() -> None:
    """Let Lightning look once for the callbacks of installed packages, and not for each Trainer."""
    from lightning.fabric.utilities import registry

    registry.entry_points = functools.cache(registry.entry_points)


def _serve(rank: int, size: int, meeting: str, pipe: Connection) -> None:
    # Lightning reads these variables to learn that its processes exist already. No process uses the port.
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(size), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=limit)
    pipe.send((True, None))
    if "lightning" in sys.modules:
        remember_entry_points()
    environment, linear = dict(os.environ), torch.nn.functional.linear
    while (job := pipe.recv()) is not None:
        fn, args, self_checks = job
        try:
            with nullcontext() if self_checks else unchecked():
                pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        os.environ.clear()  # of what the job set, such as Lightning's seed, which the next job would read
        os.environ.update(environment)
        torch.nn.functional.linear = linear  # ZeRO-3 leaves it replaced
        for group in list(dist.distributed_c10d._world.pg_map):
            if group.size() == 1 < size:  # of a mesh of FSDP2: each has threads that poll
                dist.destroy_process_group(group)
        gc.collect()
        gc.freeze()  # what jobs imported: engines collect garbage when they start
    dist.destroy_process_group()


def world_of(request: pytest.FixtureRequest, engine: str, size: int = 2) -> World:
    """Return the ranks that run an engine: DeepSpeed's have their own."""
    plain, deepspeed = {2: ("world", "deepspeed_world"), 4: ("four_ranks", "four_deepspeed_ranks")}[size]
    world: World = request.getfixturevalue(deepspeed if engine.startswith(("zero", "deepspeed")) else plain)
    return world


class OnRanks:
    """``on_ranks(fn, engine, *args)`` calls ``fn(engine, *args)`` on two ranks: DeepSpeed's engines have their own."""

    def __init__(self, request: pytest.FixtureRequest, known: dict[bytes, list[Any]]) -> None:
        self.request = request
        self.known = known

    def __call__(self, fn: Callable[..., Any], engine: str, *args: Any, **kwargs: Any) -> list[Any]:
        world = world_of(self.request, engine)
        return world(fn, engine, *args, **kwargs)

    def once(self, fn: Callable[..., Any], engine: str, *args: Any) -> list[Any]:
        """Return what the same call returned earlier in the session, and run it only the first time."""
        key = pickle.dumps((fn, engine, args))
        if key not in self.known:
            self.known[key] = self(fn, engine, *args)
        return self.known[key]
