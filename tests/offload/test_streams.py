"""The order of copies and computation on a GPU, checked without one.

A stand-in for a GPU, whose memory is that of the CPU, runs each operation of a stream as late as the waits for it
allow, and copies also as early as theirs allow. So if a wait is missing, values are wrong. Memory that is freed goes
back to the stream that allocated it once this stream and those that ``record_stream`` named have run: an operation of
another stream that still uses it is an error.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lt_tiled import ActivationCheckpointing
from lt_tiled.offload import disk, pinned
from lt_tiled.offload import offloader as offloader_module
from lt_tiled.offload.offloader import build_offloader
from lt_tiled.offload.tensors import storage_key
from tests.offload.offloaders import settle

GPU = torch.device("cuda", 1)
"""The device. The current one is another, so that code has to choose it."""


@dataclass(eq=False)
class Memory:
    """A storage on the GPU, its bytes, and the streams whose work must end before it is used again."""

    data: Tensor
    streams: list[Stream]


class Stream:
    """Operations in their order, of which those at the end have not run yet."""

    def __init__(self, gpu: LazyGPU, eager: bool = False) -> None:
        self.eager = eager
        self.pending: deque[tuple[Memory | None, Callable[[], object]]] = deque()
        self.launched = 0
        gpu.streams.append(self)

    def launch(self, memory: Memory | None, run: Callable[[], object]) -> None:
        self.launched += 1
        self.pending.append((memory, run))
        if self.eager:
            self.run_until(self.launched)

    def run_until(self, number: int) -> None:
        while self.launched - len(self.pending) < number:
            self.pending.popleft()[1]()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream, event.number = self, self.launched
        return event

    def wait_event(self, event: Event) -> None:
        self.launch(None, partial(event.stream.run_until, event.number))


class Event:
    """An event that has passed when it is asked for the third time."""

    stream: Stream
    number = asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > 2:
            self.synchronize()
        return self.asked > 2

    def synchronize(self) -> None:
        self.stream.run_until(self.number)


def at_once(run: Callable[[], None]) -> Future[None]:
    """Run a call of the disk's threads."""
    call: Future[None] = Future()
    call.set_result(run())
    return call


class LazyGPU:
    """Takes the place of ``torch.cuda`` for the package, and notes the ``errors``."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.errors: list[str] = []
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.chosen: torch.device | None = None
        self.memories: dict[int | None, Memory] = {}

    def on(self, stream: Stream) -> Any:
        return mock.patch.object(self, "current", stream)

    def device(self, device: torch.device) -> Any:
        return mock.patch.object(self, "chosen", device)

    def stream(self, stream: Stream) -> Any:
        if self.chosen != GPU:
            self.errors.append("a stream is used while another device is the current one")
        return self.on(stream)

    def allocate(self, nbytes: int) -> Tensor:
        """Return bytes that the current stream overwrites first, as their last owner may."""
        data = bytearray(nbytes)
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        self.memories[storage_key(tensor)] = Memory(torch.frombuffer(data, dtype=torch.uint8), [self.current])
        weakref.finalize(tensor.untyped_storage(), self._free, storage_key(tensor)).atexit = False
        self.run(tensor, lambda data: data.fill_(255))
        return tensor

    def _free(self, key: int) -> None:
        memory = self.memories.pop(key)
        for stream in memory.streams:
            stream.run_until(stream.launched)
        for stream in self.streams:
            if any(used is memory for used, _ in stream.pending):
                self.errors.append("memory is freed while a stream uses it")

    def finish(self) -> None:
        for stream in self.streams:
            stream.run_until(stream.launched)

    def holds(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self.memories

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self.memories[storage_key(tensor)].streams.append(stream)

    def run(self, tensor: Tensor, kernel: Callable[[Tensor], object]) -> None:
        """Launch a kernel that is given the bytes of a tensor."""
        memory = self.memories[storage_key(tensor)]
        self.current.launch(memory, partial(kernel, memory.data))

    def pack(self, offloader: Any, number: int) -> Any:
        """Save a tensor that is filled with a number, and forget it."""
        tensor = self.allocate(8000).view(torch.float32)
        self.run(tensor, lambda data: data.view(torch.float32).fill_(number))
        return offloader.pack(tensor, "block")

    def expect(self, number: int, data: Tensor) -> None:
        if set(data.view(torch.float32).tolist()) != {float(number)}:
            self.errors.append(f"tensor {number} has other values")

    @contextmanager
    def in_place_of_cuda(self) -> Iterator[None]:
        base, empty, copy_pieces = torch._C.TensorBase, torch.empty, pinned._copy_pieces

        def new(*size: int, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            return self.allocate(*size) if device == GPU else empty(*size, device=device, **kwargs)

        def copy(verb: str, tensor: Tensor, buffer: Any) -> None:
            pieces = SimpleNamespace(pieces=buffer.pieces)  # the buffer itself would be in use as long as this waits
            self.run(tensor, lambda data: copy_pieces(verb, data, pieces))

        places: list[tuple[Any, dict[str, Any]]] = [
            (torch.cuda, {"Stream": lambda device: Stream(self, self.eager), "Event": lambda blocking: Event()}),
            (torch.cuda, {"current_stream": lambda device: self.current, "stream": self.stream, "device": self.device}),
            (Tensor, {"is_cuda": property(self.holds), "record_stream": lambda t, stream: self.record(t, stream)}),
            (Tensor, {"device": property(lambda t: GPU if self.holds(t) else base.device.__get__(t))}),
            (torch, {"empty": new}),
            (disk, {"ThreadPoolExecutor": lambda *_, **__: mock.Mock(submit=at_once)}),
            (pinned, {"_copy_pieces": copy}),
        ]
        with ExitStack() as patches:
            for owner, names in places:
                patches.enter_context(mock.patch.multiple(owner, **names))
            yield


def errors(fields: dict[str, Any], eager: bool) -> list[str]:
    """Save tensors of two streams that do not wait for each other, so that each is stored while the other is current.
    Use some on the stream that did not load them, and drop some that were loaded ahead, or are still copied.
    """
    gpu = LazyGPU(eager)
    with gpu.in_place_of_cuda():
        streams = [gpu.current, Stream(gpu)]
        offloader = build_offloader(ActivationCheckpointing(**fields))
        for used in (5, 4, 0):
            packed: list[Any] = []
            for number in range(8):
                with gpu.on(streams[number % 2]):
                    packed.append(gpu.pack(offloader, number))
            if used:
                settle(offloader)
            for number in range(7, 7 - used, -1):
                with gpu.on(streams[number % 2]):
                    tensor = offloader.unpack(packed.pop())
                    gpu.run(tensor, partial(gpu.expect, number))
                    del tensor
            packed.clear()
        settle(offloader)
        offloader.close()
        gpu.finish()
    return gpu.errors


CPU: dict[str, Any] = {"offload": "cpu", "cpu_budget": "1GiB", "keep_last": 0}
DISK: dict[str, Any] = {"offload": "disk", "keep_last": 0}
BOTH: dict[str, Any] = {"offload": "cpu+disk", "cpu_budget": 16384, "keep_last": 1, "prefetch": 1}
TIERS = [CPU, DISK, BOTH, CPU | {"keep_last": 1, "prefetch": 3}, DISK | {"prefetch": 3}]


@pytest.mark.parametrize("fields", TIERS, ids=str)
def test_copies_are_in_order(fields: dict[str, Any]) -> None:
    """With each tier, copies, computation on two streams, and reuse of memory are in order."""
    assert errors(fields, eager=False) + errors(fields, eager=True) == []


OMISSIONS = [(Stream, "wait_event"), (Event, "synchronize"), (LazyGPU, "record"), (LazyGPU, "device")]


@pytest.mark.parametrize(("owner", "name"), OMISSIONS)
def test_omissions_are_found(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in finds a wait, a record or a choice of the device that is left out."""
    monkeypatch.setattr(owner, name, lambda *_: nullcontext())
    assert errors(CPU, eager=False) + errors(DISK, eager=False)


def test_loaded_ahead_while_a_store_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is being loaded ahead stays when a store finds the budget full."""
    monkeypatch.setattr(offloader_module, "MIN_BYTES", 0)
    gpu = LazyGPU(eager=False)
    policy = ActivationCheckpointing(offload="cpu", cpu_budget=4 * 8192, keep_last=0, prefetch=2)
    with gpu.in_place_of_cuda():
        offloader = build_offloader(policy)
        packed = [gpu.pack(offloader, number) for number in range(4)]
        settle(offloader)
        tensor = offloader.unpack(packed.pop())  # which begins to load two ahead
        more = [gpu.pack(offloader, number) for number in (9, 10, 11)]
        tensor = offloader.unpack(packed.pop())
        gpu.run(tensor, partial(gpu.expect, 2))
        more.clear()
        offloader.close()
        gpu.finish()
    assert gpu.errors == []
