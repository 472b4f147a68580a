"""Offloaders to disk, and waiting for what their threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
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


def hold_writes(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Return an event that says that a write runs, and one that lets it and those after it go on."""
    running, gate, write = threading.Event(), threading.Event(), offloader.disk._write
    monkeypatch.setattr(offloader.disk, "_write", lambda *a: (running.set(), gate.wait(LIMIT), write(*a)))
    return running, gate
