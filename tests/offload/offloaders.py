"""Offloaders to disk, and waiting for what their threads do."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_tiled import ActivationCheckpointing, OffloadError
from lt_tiled.offload.offloader import Offloader, build_offloader
from lt_tiled.offload.prefetch import OffloadedTensor
from tests.processes import LIMIT


def disk(tmp_path: Path, **fields: Any) -> Offloader:
    """Return an offloader that sends everything to a disk."""
    fields = {"offload": "disk", "directory": str(tmp_path), "keep_last": 0, **fields}
    return build_offloader(ActivationCheckpointing(**fields))


def within_limit(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true: a thread drops what it has written just after its future is done."""
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def settle(offloader: Offloader) -> None:
    """Wait until every tensor is stored."""

    def stored() -> bool:
        with offloader._lock, suppress(OffloadError):
            offloader._reap()
        return not offloader._storing

    assert within_limit(stored)


def away(offloader: Offloader, tensor: Tensor, block: str = "block") -> OffloadedTensor:
    """Pack a tensor and wait until its bytes are stored."""
    packed = offloader.pack(tensor, block)
    assert isinstance(packed, OffloadedTensor)
    settle(offloader)
    return packed


def unused(offloader: Offloader) -> bool:
    """Return whether all space of the file is free: a call that runs frees its space when it ends."""
    return within_limit(lambda: offloader.disk.spill.used == 0)


def freed(storage: weakref.ref[torch.UntypedStorage]) -> bool:
    """Return whether a storage is freed."""
    return within_limit(lambda: storage() is None)


def hold_writes(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Return an event that says that a write runs, and one that lets it and those after it go on."""
    running, gate, write = threading.Event(), threading.Event(), offloader.disk.spill._write
    monkeypatch.setattr(offloader.disk.spill, "_write", lambda *a: (running.set(), gate.wait(LIMIT), write(*a)))
    return running, gate
