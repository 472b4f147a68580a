"""The order of copies and computation of a GPU, checked without one. See ``tests/offload/streams.py``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lt_tiled import ActivationCheckpointing, prepare
from lt_tiled.offload import pinned
from lt_tiled.offload.offloader import build_offloader
from tests.models import TinyLM, lm_loss
from tests.offload.offloaders import settle
from tests.offload.streams import Event, Stream, StreamCheck

CPU: dict[str, Any] = {"offload": "cpu", "cpu_budget": "1GiB"}
DISK: dict[str, Any] = {"offload": "disk"}
BOTH: dict[str, Any] = {"offload": "cpu+disk", "cpu_budget": 16384}
POLICIES: list[dict[str, Any]] = [
    tier | fields for tier in (CPU, DISK, BOTH) for fields in ({"prefetch": 3}, {"keep_last": 1, "prefetch": 1})
]


def ids(rows: int = 2) -> Tensor:
    return torch.arange(rows * 6).view(rows, 6) % 32


class Stumbled(Exception):
    pass


def train(check: StreamCheck, fields: dict[str, Any]) -> None:
    """Train on the device: with accumulation, on two streams, with dropped graphs, and with steps that end early."""
    torch.manual_seed(0)
    model, calls = TinyLM(3, 8, 8), [0]
    side = Stream(check, torch.device("cuda", 0))

    def count(*_: object) -> None:
        calls[0] += 1
        if calls[0] in (3, 13, 31):
            raise Stumbled

    with prepare(model, activation_checkpointing=ActivationCheckpointing(**{"keep_last": 0} | fields)) as prepared:
        for block in model.blocks:
            block.attention.register_forward_pre_hook(count)
        check.adopt(*model.parameters())
        for rows in (2, 1):
            inputs = check.adopt(ids(rows))
            with suppress(Stumbled):
                lm_loss(model(inputs), inputs).backward()
            with suppress(Stumbled):
                model(inputs)  # a graph that is dropped
            with suppress(Stumbled), check.stream(side):
                side.wait_event(check.default[0].record_event())
                loss = lm_loss(model(inputs), inputs)
                (gradient,) = torch.autograd.grad(loss, model.embed.weight)
                del loss, gradient
            check.default[0].wait_event(side.record_event())
            gc.collect()
        stored = prepared.offloader.stats
        assert stored.cpu_bytes + stored.disk_bytes > 0


def by_hand(check: StreamCheck, fields: dict[str, Any]) -> None:
    """Offload tensors of two devices, use them on another stream than the one that loads them, and drop some early."""
    side = Stream(check, torch.device(check.kind, 0))
    offloader = build_offloader(ActivationCheckpointing(**{"keep_last": 0, "prefetch": 2} | fields))
    for _ in range(3):
        tensors = [check.adopt(torch.full((2000,), float(i)), index=i % 2) * 2 for i in range(8)]
        packed = [offloader.pack(tensor, "block") for tensor in tensors]
        del tensors
        settle(offloader)
        for i in (7, 6, 5, 4, 3):  # the two before it are loaded ahead, and dropped
            with check.stream(side) if i == 6 and check.kind == "cuda" else nullcontext():
                assert offloader.unpack(packed[i]).add(1).tolist() == [2.0 * i + 1] * 2000
        packed = [offloader.pack(check.adopt(torch.randn(2000)) * 2, "block")]
        packed.clear()  # while it is copied
    settle(offloader)
    offloader.close()


def by_turns(check: StreamCheck, fields: dict[str, Any]) -> None:
    """Offload tensors of two streams that do not wait for each other: each is stored when the other stream saves its
    next one. Use some, and drop some early.
    """
    streams = [check.default[0], Stream(check, torch.device("cuda", 0))]
    offloader = build_offloader(ActivationCheckpointing(**{"keep_last": 1} | fields))
    for used in (5, 4, 0):
        packed: list[Any] = []
        for number in range(6):
            with check.stream(streams[number % 2]):
                packed.append(offloader.pack(check.adopt(torch.randn(2000)) * 2, "block"))
        while len(packed) > 6 - used:
            with check.stream(streams[(len(packed) - 1) % 2]):
                offloader.unpack(packed.pop())
        packed.clear()
    settle(offloader)
    offloader.close()


@pytest.mark.table("train-.*(prefetch': 3|1GiB'}).*|by_.*prefetch': 3.*")
@pytest.mark.parametrize("fields", POLICIES, ids=str)
@pytest.mark.parametrize("scenario", [train, by_hand, by_turns])
def test_every_two_accesses_are_ordered(scenario: Callable[..., None], fields: dict[str, Any]) -> None:
    """With each tier, copies, computation and reuse of memory are in order: accumulation, a second stream, dropped
    graphs, and errors in the forward pass, the recompute and the backward pass; two GPUs in one process; tensors that
    one stream saves and another stores.
    """
    with StreamCheck() as check:
        scenario(check, fields)
    assert check.races == []


@contextmanager
def skipped(kind: type, method: str, *callers: str) -> Iterator[None]:
    """Leave out a method where these functions call it, the last one first."""
    real = getattr(kind, method)

    def call(*args: Any) -> Any:
        frames, found = sys._getframe(1), []
        while frames is not None and len(found) < len(callers):
            found, frames = [*found, frames.f_code.co_name], frames.f_back
        return None if found == [*callers] else real(*args)

    with mock.patch.object(kind, method, call):
        yield


def freed_at_once() -> Any:
    return mock.patch.multiple(pinned.Copy, done=lambda _: True, wait=lambda copied: setattr(copied, "tensor", None))


MUTATIONS: dict[str, tuple[Callable[..., None], dict[str, Any], Callable[[], Any]]] = {
    "store before computed": (train, CPU, lambda: skipped(Stream, "wait_event", "_copy")),
    "use before loaded": (train, CPU, lambda: skipped(Stream, "wait_event", "loaded")),
    "write before copied": (train, DISK, lambda: skipped(Event, "synchronize", "wait", "_write")),
    "free before copied": (train, CPU, freed_at_once),
    "drop in use": (by_hand, CPU, lambda: skipped(Tensor, "record_stream", "loaded")),
    "another device": (by_hand, DISK, lambda: mock.patch.object(torch.cuda, "device", nullcontext)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_wait_that_is_left_out_is_found(mutation: str) -> None:
    """The check finds a race if any one wait, record or check of an event is left out."""
    scenario, fields, leave_out = MUTATIONS[mutation]
    with StreamCheck() as check, leave_out():
        scenario(check, fields)
    assert check.races != []


@pytest.mark.parametrize("fields", [CPU, DISK], ids=str)
def test_memory_is_free_when_its_copy_has_ended(fields: dict[str, Any]) -> None:
    """A stored tensor's memory can be reused at once: no ``record_stream``, which would delay that until the device has
    caught up with the host.
    """
    with StreamCheck() as check:
        offloader = build_offloader(ActivationCheckpointing(**{"keep_last": 0} | fields))
        packed = [offloader.pack(check.adopt(torch.randn(2000)) * 2, "block") for _ in range(6)]
        settle(offloader)
        assert check.bytes_on_devices == 0
        for record in reversed(packed):
            offloader.unpack(record)
        assert (check.bytes_on_devices, check.records) == (0, 0)
        offloader.close()


@pytest.mark.parametrize("fields", [CPU, DISK, BOTH], ids=str)
def test_other_devices(fields: dict[str, Any]) -> None:
    """Devices without the CUDA runtime (XPU, MPS, NPU) copy through memory that is not pinned."""
    with StreamCheck("xpu") as check:
        by_hand(check, fields)
    assert check.races == []
