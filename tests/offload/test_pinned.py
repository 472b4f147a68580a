"""Slabs of CPU memory that the system refuses to pin or to allocate."""

from __future__ import annotations

import mmap

import pytest

from lt_tiled.offload import pinned
from lt_tiled.offload.pinned import Slabs


def test_refused_pinning_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be pinned is used unpinned, with one warning for all slabs and no further attempts."""
    asked: list[int] = []
    monkeypatch.setattr(pinned, "_pin_pages", lambda memory: asked.append(memory.nbytes))
    slabs = Slabs(2**30)
    slots = [slabs.take(200 * 2**20, pin=True) for _ in range(3)]
    assert all(slot is not None for slot in slots)
    assert len(asked) == 1
    assert caplog.text.count("refuses to pin CPU memory") == 1
    slabs.close()


def test_no_memory_left_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the system has less memory than the budget, the allocated slabs stay in use, with one warning."""
    slabs = Slabs(2**30)
    first = slabs.take(200 * 2**20, pin=False)

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert [slabs.take(200 * 2**20, pin=False) for _ in range(3)] == [None] * 3
    assert caplog.text.count("Cannot allocate 0.25 GiB of CPU memory") == 1
    del first
    assert slabs.take(200 * 2**20, pin=False) is not None
    slabs.close()
