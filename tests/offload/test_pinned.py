"""RAM in slabs: what happens when the system refuses to lock or to give it."""

from __future__ import annotations

import mmap

import pytest

from lt_tiled.offload import pinned
from lt_tiled.offload.pinned import Slabs


def test_refused_page_locks_fall_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where RAM cannot be page-locked it is used as it is, with one warning for all slabs, and is asked no more."""
    asked: list[int] = []
    monkeypatch.setattr(pinned, "_lock_pages", lambda memory: asked.append(memory.nbytes))
    slabs = Slabs(2**30)
    slots = [slabs.take(200 * 2**20, pin=True) for _ in range(3)]
    assert all(slot is not None for slot in slots)
    assert len(asked) == 1
    assert caplog.text.count("refuses to page-lock RAM") == 1
    slabs.close()


def test_no_ram_left_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the system has less RAM than the budget, what there is stays in use and the rest goes elsewhere, with one
    warning.
    """
    slabs = Slabs(2**30)
    first = slabs.take(200 * 2**20, pin=False)

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert [slabs.take(200 * 2**20, pin=False) for _ in range(3)] == [None] * 3
    assert caplog.text.count("no 268435456 bytes of RAM left") == 1
    first.free()
    assert slabs.take(200 * 2**20, pin=False) is not None
    slabs.close()
