"""Waiting for what the threads of an offloader do, and system calls that fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from lt_tiled import ActivationCheckpointing, OffloadError
from lt_tiled.offload.offloader import OffloadedTensor, Offloader, build_offloader
from tests.processes import LIMIT


def disk(tmp_path: Path, **fields: Any) -> Offloader:
    """Return an offloader that sends everything to a disk."""
    fields = {"offload": "disk", "directory": str(tmp_path), "keep_last": 0, **fields}
    return build_offloader(ActivationCheckpointing(**fields))


def within_limit(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true while threads work."""
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def settle(offloader: Offloader) -> None:
    """Wait until every tensor that is being stored is away."""

    def away() -> bool:
        with offloader._lock, suppress(OffloadError):
            offloader._settle(offloader.waiting(), 0)
        return all(record.tier is None or record.tensor is None for record in offloader.waiting())

    assert within_limit(away)


def away(offloader: Offloader, tensor: Tensor, block: str = "block") -> OffloadedTensor:
    """Pack a tensor and wait until its bytes are stored."""
    packed = offloader.pack(tensor, block)
    assert isinstance(packed, OffloadedTensor)
    settle(offloader)
    return packed


def unused(offloader: Offloader) -> bool:
    """Return whether no bytes of the file and of CPU memory are in use: a call that runs frees its own when it ends."""

    def empty() -> bool:
        return not (offloader.disk and offloader.disk._places) and not (offloader.cpu and offloader.cpu._buffers)

    return within_limit(empty)


Fault = Callable[..., Any]


def fail(code: int) -> Fault:
    """A call that fails with an error number."""

    def call(real: Any, *args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@contextmanager
def nth_call(function: str, n: int, fault: Fault) -> Iterator[list[int]]:
    """Let the n-th call of ``os.function`` meet the fault; the list holds how many calls there were."""
    real, calls = getattr(os, function), [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        return fault(real, *args) if calls[0] == n else real(*args)

    with patch.object(os, function, call):
        yield calls


def each_call(function: str, fault: Fault) -> Iterator[int]:
    """Contexts in which the first, second, ... call fails; ends once a context saw fewer calls than that."""
    for n in range(1, 100):
        with nth_call(function, n, fault) as calls:
            yield n
        if calls[0] < n:
            return
    raise AssertionError(f"{function} is called without end")
