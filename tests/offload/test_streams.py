"""The order of copies and computation of a GPU, checked without one. See ``tests/offload/streams.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from lt_tiled import ActivationCheckpointing
from lt_tiled.offload.offloader import build_offloader
from tests.offload.offloaders import settle
from tests.offload.streams import Event, Stream, StreamCheck

CPU: dict[str, Any] = {"offload": "cpu", "cpu_budget": "1GiB", "keep_last": 0}
DISK: dict[str, Any] = {"offload": "disk", "keep_last": 0}
BOTH: dict[str, Any] = {"offload": "cpu+disk", "cpu_budget": 16384, "keep_last": 1, "prefetch": 1}
TIERS = [CPU, DISK, BOTH, CPU | {"keep_last": 1, "prefetch": 3}, DISK | {"prefetch": 3}]


def steps(fields: dict[str, Any]) -> list[str]:
    """Save tensors of two streams that do not wait for each other, so that each is stored while the other is current.
    Use some on the stream that did not load them, and drop some that were loaded ahead, or are still copied. Return the
    accesses that are not ordered.
    """
    with StreamCheck() as check:
        streams = [check.default, Stream(check, "side stream")]
        offloader = build_offloader(ActivationCheckpointing(**fields))
        for used in (5, 4, 0):
            packed: list[Any] = []
            for number in range(8):
                with check.on(streams[number % 2]):
                    tensor = check.adopt(torch.full((2000,), float(number)))
                    check.use(tensor, write=True)
                    packed.append(offloader.pack(tensor, "block"))
                    del tensor
            if used:
                settle(offloader)
            for number in range(7, 7 - used, -1):
                with check.on(streams[number % 2]):
                    tensor = offloader.unpack(packed.pop())
                    check.use(tensor)
                    assert tensor.tolist() == [float(number)] * 2000
                    del tensor
            packed.clear()
        settle(offloader)
        offloader.close()
    return check.races


@pytest.mark.parametrize("fields", TIERS, ids=str)
def test_every_two_accesses_are_ordered(fields: dict[str, Any]) -> None:
    """With each tier, copies, computation on two streams, and reuse of memory are in order."""
    assert steps(fields) == []


def nothing(*_: object) -> None:
    """Take the place of what is left out. A mock would keep its arguments alive."""


LEFT_OUT: dict[str, Callable[[], Any]] = {
    "waits of streams": lambda: mock.patch.object(Stream, "wait_event", nothing),
    "waits of the host": lambda: mock.patch.object(Event, "synchronize", nothing),
    "records": lambda: mock.patch.object(StreamCheck, "record", nothing),
    "the choice of the device": lambda: mock.patch.object(StreamCheck, "device", nullcontext),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_found(name: str) -> None:
    """The check finds a race where a wait, a record or the choice of the device is left out."""
    with LEFT_OUT[name]():
        assert steps(CPU) + steps(DISK)
