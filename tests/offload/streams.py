"""A stand-in for a GPU on CPU tensors, which checks that every two accesses to the same memory are ordered.

Copies run at once on the CPU, so results are right whatever wait is missing. What is checked is whether a GPU would
have run them in that order. Each stream, the host and each call of the disk's threads has a vector clock. An operation
on a stream comes after what the host did before the launch, what the stream did before, and the events that the stream
waited for. Memory follows the rules of torch's caching allocator: what a stream allocates may still be in use by it,
and what is freed goes to that stream at once, whatever other streams do with it, unless ``record_stream`` named them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lt_tiled.offload import disk, pinned
from lt_tiled.offload.tensors import storage_key

GPU = torch.device("cuda", 1)
"""The device. The current one is another, so that code has to choose it."""
Clock = dict[str, int]
"""How many operations of each stream, the host and each call came before."""


def joined(*clocks: Clock) -> Clock:
    return {agent: max(c.get(agent, 0) for c in clocks) for clock in clocks for agent in clock}


class Memory:
    """A storage. ``stream`` is that for which it was allocated, ``None`` of CPU memory."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.recorded: set[Stream] = set()
        self.accesses: dict[tuple[str, bool], tuple[int, str]] = {}
        """The last read and the last write of each agent, and the names of the operations."""

    def late(self, clock: Clock, write: bool) -> list[str]:
        """Return what a read or write with this clock must wait for, and does not."""
        found = []
        for (agent, wrote), (count, what) in self.accesses.items():
            if (write or wrote) and clock.get(agent, 0) < count:
                found.append(f"{what} on {agent}")
        return found


class Stream:
    def __init__(self, check: StreamCheck, name: str) -> None:
        self.check, self.name, self.clock = check, name, Clock()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.check)
        event.clock, event.asked = joined(self.clock, self.check.host), 0
        return event

    def wait_event(self, event: Event) -> None:
        self.clock = joined(self.clock, event.clock)


class Event:
    """An event that has passed when it is asked for the third time."""

    def __init__(self, check: StreamCheck, **_: Any) -> None:
        self.check, self.clock, self.asked = check, Clock(), 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > 2:
            self.synchronize()
        return self.asked > 2

    def synchronize(self) -> None:
        self.check.host = joined(self.check.host, self.clock)


class Call:
    """A call of the disk's threads. It runs at once with a clock of its own; who sees that it ended comes after it."""

    def __init__(self, check: StreamCheck, run: Callable[[], None]) -> None:
        self.check, before, agent = check, check.host, check.agent
        check.agent = f"call {id(self)}"
        run()
        self.end = check.host
        check.ended = joined(check.ended, self.end)
        check.host, check.agent = before, agent

    def done(self) -> bool:
        return self.exception() is None

    def exception(self) -> None:
        self.check.host = joined(self.check.host, self.end)


class Threads:
    """Takes the place of the disk's ``ThreadPoolExecutor``."""

    def __init__(self, check: StreamCheck) -> None:
        self.submit = partial(Call, check)

    def shutdown(self, cancel_futures: bool) -> None:
        """Do nothing: all calls have ended."""


class StreamCheck:
    """Takes the place of ``torch.cuda`` for the package, and notes the ``races``."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.host, self.agent = Clock(), "host"
        """The clock and the name of what runs now: the host, or a call."""
        self.ended = Clock()
        """What calls did that have ended, and so dropped their buffers."""
        self.default = self.current = Stream(self, "default stream")
        self._device: torch.device | None = None
        self._memory: dict[int, Memory] = {}
        self._patches = ExitStack()

    @contextmanager
    def _set(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        yield
        setattr(self, name, before)

    def device(self, device: torch.device | None = None) -> Any:
        return self._set("_device", device)

    def on(self, stream: Stream) -> Any:
        return self._set("current", stream)

    def checked_stream(self, stream: Stream) -> Any:
        if self._device != GPU:
            self.races.append("a stream is used while another device is the current one")
        return self.on(stream)

    # Memory

    def adopt(self, tensor: Tensor) -> Tensor:
        """Declare a tensor to be allocated on the GPU by the current stream, and return it."""
        self._of(tensor, self.current)
        return tensor

    def is_on_gpu(self, tensor: Tensor) -> bool:
        memory = self._memory.get(storage_key(tensor))
        return memory is not None and memory.stream is not None

    def _of(self, tensor: Tensor, stream: Stream | None = None) -> Memory:
        key = storage_key(tensor)
        if key not in self._memory:
            self._memory[key] = Memory(stream)
            weakref.finalize(tensor.untyped_storage(), self._free, key).atexit = False
            if stream is not None:  # what it still does with the last owner of the memory
                self._book(stream, self._memory[key], True, "allocation")
        return self._memory[key]

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.stream is not None:
            # A call that waited for a copy kept the tensor until then.
            clocks = [stream.clock for stream in (memory.stream, *memory.recorded)]
            late = memory.late(joined(self.host, self.ended, *clocks), write=True)
            self.races += [f"freed for {memory.stream.name} during {what}" for what in late]

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self._of(tensor).recorded.add(stream)

    def _book(self, stream: Stream | None, memory: Memory, write: bool, what: str) -> None:
        """Note an access by a stream, or else by what runs now, and compare it with those before."""
        clock = self.host if stream is None else joined(stream.clock, self.host)
        agent = self.agent if stream is None else stream.name
        self.races += [f"{what} on {agent} does not wait for {other}" for other in memory.late(clock, write)]
        count = clock.get(agent, 0) + 1
        memory.accesses[agent, write] = count, what
        if stream is None:
            self.host = {**clock, agent: count}
        else:
            stream.clock = {**clock, agent: count}

    def use(self, tensor: Tensor, write: bool = False) -> None:
        """Read or write a tensor of the GPU on the current stream, as a kernel does."""
        self._book(self.current, self._of(tensor), write, "kernel")

    # In the place of torch.cuda

    def __enter__(self) -> StreamCheck:
        base, empty = torch._C.TensorBase, torch.empty
        copy, take, move = pinned._copy_pieces, pinned.CPUMemory.take, disk.Disk._move

        def seen(real: Any, instead: Any) -> property:
            """Return a property with another value for the package, of what is on the GPU."""

            def get(tensor: Tensor) -> Any:
                ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("lt_tiled.offload")
                return instead if ours and self.is_on_gpu(tensor) else real.__get__(tensor)

            return property(get)

        def new(*size: int, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            if device is None or torch.device(device).type != "cuda":
                return empty(*size, device=device, **kwargs)
            return self.adopt(empty(*size, **kwargs))

        def copied(verb: str, tensor: Tensor, buffer: Any) -> None:
            copy(verb, tensor, buffer)
            self._book(self.current, self._of(tensor), verb == "load", f"{verb} of a tensor")
            for piece in buffer.pieces:
                self._book(self.current, self._of(piece), verb == "store", f"{verb} of a tensor")

        def taken(*args: Any) -> Any:
            self.host = joined(self.host, self.ended)
            return take(*args)

        def moved(file: Any, verb: str, place: Any, buffer: Any) -> None:
            for piece in buffer.pieces:
                self._book(None, self._of(piece), verb == "read", f"{verb} of the file")
            move(file, verb, place, buffer)

        cuda = {"Stream": lambda device: Stream(self, "copy stream"), "Event": partial(Event, self)}
        cuda |= {"current_stream": lambda device: self.current, "stream": self.checked_stream}
        cuda |= {"device": self.device}
        tensor = {"is_cuda": seen(base.is_cuda, True), "device": seen(base.device, GPU)}
        tensor |= {"record_stream": lambda tensor, stream: self.record(tensor, stream)}
        for where, names in (
            (torch.cuda, cuda),
            (Tensor, tensor),
            (torch, {"empty": new}),
            (disk, {"ThreadPoolExecutor": lambda *_, **__: Threads(self)}),
            (disk.Disk, {"_move": moved}),
            (pinned.CPUMemory, {"take": taken}),
            (pinned, {"_copy_pieces": copied}),
        ):
            self._patches.enter_context(mock.patch.multiple(where, **names))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
