"""Making the n-th call of a system function fail, for n = 1, 2, 3, ... until nothing fails any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

Fault = Callable[..., Any]


def fail(code: int) -> Fault:
    """A call that fails with an error number."""

    def call(real: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def short(real: Any, file: int, buffers: list[memoryview], offset: int) -> int:
    """A read or write that moves half of what it was asked to, but at least a page."""
    half = max(len(buffers[0]) // 2 // 4096 * 4096, 1)
    return real(file, [buffers[0][:half]], offset)


def nothing(real: Any, *args: Any, **kwargs: Any) -> int:
    """A read or write that moves nothing."""
    return 0


@contextmanager
def nth_call(function: str, n: int, fault: Fault) -> Iterator[list[int]]:
    """Let the n-th call of ``os.function`` meet the fault; the list holds how many calls there were."""
    real, calls = getattr(os, function), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return fault(real, *args, **kwargs) if calls[0] == n else real(*args, **kwargs)

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
