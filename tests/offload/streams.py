"""A stand-in for CUDA on CPU tensors, which checks that every two accesses to the same bytes are ordered.

Operations run at once on the CPU, so results are right whatever wait is missing. What is checked is whether a GPU would
have run them in that order. Each stream and thread has a vector clock. An operation on a stream comes after what its
thread did before the launch, what the stream did before, and the events that the stream waited for. Memory follows the
rules of torch's caching allocator: what a stream allocates may still be in use by it, and what is freed goes to that
stream at once, whatever other streams do with it, unless ``record_stream`` named them.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock, get_ident, local
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lt_tiled.offload import disk, pinned
from lt_tiled.offload.tensors import raw_bytes, storage_key

Clock = dict[str, int]
"""How many operations of each stream and thread came before."""


def joined(*clocks: Clock) -> Clock:
    return {agent: max(c.get(agent, 0) for c in clocks) for clock in clocks for agent in clock}


class Access(NamedTuple):
    agent: str
    count: int
    write: bool
    low: int
    high: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.agent, 0) >= self.count


class Memory:
    """The bytes of one storage, by address. ``stream`` is that for which it was allocated, ``None`` of CPU memory."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream | None) -> None:
        self.low, self.high, self.stream = storage.data_ptr(), storage.data_ptr() + storage.nbytes(), stream
        self.recorded: set[Stream] = set()
        self.accesses: list[Access] = []


class Stream:
    def __init__(self, check: StreamCheck, device: torch.device) -> None:
        self.check, self.device, self.clock = check, device, Clock()
        self.name = f"stream {len(check.streams)} of {device}"
        check.streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.check)
        event.clock, event.asked = joined(self.clock, self.check.host), 0
        return event

    def wait_event(self, event: Event) -> None:
        self.clock = joined(self.clock, event.clock)

    def synchronize(self) -> None:
        self.check.host_knows(self.clock)


class Event:
    def __init__(self, check: StreamCheck, **_: Any) -> None:
        self.check, self.clock, self.asked = check, Clock(), 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > self.check.patience:
            self.synchronize()
        return self.asked > self.check.patience

    def synchronize(self) -> None:
        self.check.host_knows(self.clock)


class TrackedThreads(ThreadPoolExecutor):
    """Calls come after what was done before they were submitted; who sees that one ended comes after it."""

    check: StreamCheck

    def submit(self, call: Any) -> Any:  # type: ignore[override]
        sent, end = self.check.host, Clock()

        def run() -> None:
            self.check.host_knows(sent)
            try:
                with _Operations(self.check):
                    call()
            finally:
                self.check.buffers_dropped()
                end.update(self.check.host)

        future = super().submit(run)
        done, exception = future.done, future.exception

        def is_done() -> bool:
            if ended := done():
                self.check.host_knows(end)
            return ended

        def its_exception() -> BaseException | None:
            error = exception()
            self.check.host_knows(end)
            return error

        vars(future).update(done=is_done, exception=its_exception)
        return future


class StreamCheck:
    """Two devices of a ``kind``. An event passes when it is asked for the ``patience + 1``-th time."""

    def __init__(self, kind: str = "cuda", patience: int = 2) -> None:
        self.kind, self.patience = kind, patience
        self.races: list[str] = []
        self.records = 0
        """How often ``record_stream`` named another stream than the one for which a tensor was allocated."""
        self.streams: list[Stream] = []
        self._lock, self._local, self._stack = RLock(), local(), ExitStack()
        self._hosts: defaultdict[int, Clock] = defaultdict(dict)
        self._memory: dict[int, Memory] = {}
        self._given = Clock()
        self.default = [Stream(self, torch.device(kind, index)) for index in range(2)]

    # Clocks and streams

    @property
    def host(self) -> Clock:
        return self._hosts[get_ident()]

    def host_knows(self, clock: Clock) -> None:
        self._hosts[get_ident()] = joined(self.host, clock)

    def buffers_dropped(self) -> None:
        self._given = joined(self._given, self.host)

    def current_stream(self, device: torch.device) -> Stream:
        return vars(self._local).get(device, self.default[device.index])

    @contextmanager
    def _set(self, key: Any, value: Any) -> Iterator[None]:
        before, vars(self._local)[key] = dict(vars(self._local)), value
        yield
        vars(self._local).clear()
        vars(self._local).update(before)

    def device(self, device: torch.device) -> Any:
        return self._set("device", device.index)

    def stream(self, stream: Stream) -> Any:
        if stream.device.index != vars(self._local).get("device", 0):
            self.races.append(f"a stream of {stream.device} is used while another device is the current one")
        return self._set(stream.device, stream)

    # Memory

    def adopt(self, *tensors: Tensor, index: int = 0) -> Tensor:
        """Declare tensors, and what is computed from them, to be on a device. Return the first."""
        with self._lock:
            for tensor in tensors:
                self._of(tensor, self.current_stream(torch.device(self.kind, index)))
        return tensors[0]

    @property
    def bytes_on_devices(self) -> int:
        return sum(memory.high - memory.low for memory in self._memory.values() if memory.stream is not None)

    def device_of(self, tensor: Tensor) -> torch.device | None:
        memory = self._memory.get(storage_key(tensor))
        return None if memory is None or memory.stream is None else memory.stream.device

    def _of(self, tensor: Tensor, stream: Stream | None = None) -> Memory:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if (memory := self._memory.get(key)) is None:
            memory = self._memory[key] = Memory(storage, stream)
            weakref.finalize(storage, self._free, key, memory).atexit = False
            if stream is not None:  # what it still does with the bytes' last owner
                self._book(stream, memory, memory.low, memory.high, True, "allocation")
        return memory

    def _free(self, key: int, memory: Memory) -> None:
        with self._lock:
            self._memory.pop(key)
            if memory.stream is not None:
                # A thread that waited for a copy kept the tensor until then.
                clocks = [*self._hosts.values(), *(s.clock for s in (memory.stream, *memory.recorded))]
                late = [a for a in memory.accesses if not a.before(joined(*clocks))]
                self.races += [f"freed for {memory.stream.name} while {a.agent} does {a.what}" for a in late]

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self.records += stream is not self._of(tensor).stream
        self._of(tensor).recorded.add(stream)

    def _book(self, stream: Stream | None, memory: Memory, low: int, high: int, write: bool, what: str) -> None:
        """Note an access by a stream, or else by this thread, and compare it with those before."""
        clock = self.host if stream is None else joined(stream.clock, self.host)
        agent = f"thread {get_ident()}" if stream is None else stream.name
        meet = [a for a in memory.accesses if (write or a.write) and a.low < high and low < a.high]
        late = [a for a in meet if not a.before(clock)]
        self.races += [f"{what} on {agent} is not ordered after {a.what} on {a.agent}" for a in late]
        new = Access(agent, clock.get(agent, 0) + 1, write, low, high, what)
        if stream is not None:
            stream.clock = {**clock, agent: new.count}
        else:
            self.host_knows({agent: new.count})
        # Later accesses of an agent come after its earlier ones: of those to the same bytes only the last counts.
        covered = {
            a for a in memory.accesses if a.agent == agent and low <= a.low and a.high <= high and a.write <= write
        }
        memory.accesses = [*(a for a in memory.accesses if a not in covered), new]

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note what it reads and writes: on the current stream if it touches a device."""
        result, returns = func(*args, **kwargs), func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return result  # a view
        touched: list[tuple[Tensor, bool]] = []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            touched += [(t, writes) for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel()]
        given = {storage_key(t) for t, _ in touched}
        with self._lock:
            if not given & self._memory.keys():
                return result
            devices = [device for t, _ in touched if (device := self.device_of(t)) is not None]
            stream = self.current_stream(devices[0]) if devices else None
            if stream is not None:
                results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
                touched += [(t, True) for t in results if storage_key(t) not in given and self._of(t, stream)]
            what = func._schema.name.split("::")[-1]
            for tensor, writes in touched:
                low = tensor.data_ptr()
                self._book(stream, self._of(tensor), low, low + raw_bytes(tensor).nbytes, writes, what)
            if stream is not None and what == "copy_" and not any(args[2:]) and len(devices) == 1:
                self.host_knows(stream.clock)  # it blocks between a device and the CPU
        return result

    def transfer(self, pieces: list[Tensor], write: bool) -> None:
        """Note that this thread reads or writes the bytes of CPU memory."""
        for piece in pieces:
            low = piece.data_ptr()
            with self._lock:
                for memory in [m for m in self._memory.values() if m.low <= low < m.high]:
                    self._book(None, memory, low, low + piece.nbytes, write, "input or output of the file")

    # In the place of torch.cuda

    def __enter__(self) -> StreamCheck:
        base, empty, numpy = torch._C.TensorBase, torch.empty, Tensor.numpy
        take, move = pinned.CPUMemory.take, disk.Disk._move

        def seen(real: Any, instead: Any) -> property:
            """Return a property with another value for the package, of what is on a device."""

            def get(tensor: Tensor) -> Any:
                ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("lt_tiled.offload")
                device = self.device_of(tensor) if ours else None
                return real.__get__(tensor) if device is None else instead(device)

            return property(get)

        def new(*size: int, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            if device is None or torch.device(device).type != self.kind:
                return empty(*size, device=device, **kwargs)
            return self.adopt(empty(*size, **kwargs), index=device.index)

        def to_numpy(tensor: Tensor) -> Any:
            assert self.device_of(tensor) is None, "a tensor on a device is no array"
            return numpy(tensor)

        def taken(*args: Any) -> Any:
            self.host_knows(self._given)  # what a thread did before its call dropped a buffer came before
            return take(*args)

        def moved(file: Any, verb: str, place: Any, buffer: Any) -> None:
            self.transfer(buffer.pieces, verb == "read")
            move(file, verb, place, buffer)

        cuda = {"Stream": partial(Stream, self), "Event": partial(Event, self)}
        cuda |= {"current_stream": self.current_stream, "stream": self.stream, "device": self.device}
        tensor = {"is_cuda": seen(base.is_cuda, lambda d: d.type == "cuda"), "device": seen(base.device, lambda d: d)}
        tensor |= {"numpy": to_numpy, "record_stream": lambda tensor, stream: self.record(tensor, stream)}
        for where, names in (
            (torch.cuda, cuda),
            (Tensor, tensor),
            (torch, {"empty": new}),
            (disk, {"ThreadPoolExecutor": type("Threads", (TrackedThreads,), {"check": self})}),
            (disk.Disk, {"_move": moved}),
            (pinned.CPUMemory, {"take": taken}),
        ):
            self._stack.enter_context(mock.patch.multiple(where, **names))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Operations(TorchDispatchMode):
    def __init__(self, check: StreamCheck) -> None:
        super().__init__()
        self.check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.check.operation(func, args, kwargs or {})
