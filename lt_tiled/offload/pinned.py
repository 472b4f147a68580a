"""CPU memory in pinned buffers, and the copies between it and devices.

NOTE [Rooms]
Everything that reads or writes a buffer, or a place in the file, refers to it: the record of a saved tensor, and each
copy or call that waits or runs. It is free when no reference is left. So wherever Ctrl-C or an error interrupts the
code, what may still be written is in use, and nothing is lost.

NOTE [Streams]
Each device has one copy stream, so its copies run in order. A copy waits for the event after which its source is
complete and its destination free; the current stream waits for a loaded tensor before it uses it. :class:`CPUMemory`
keeps both ends of a copy until its event has passed, so neither is reused before. With ``record_stream`` freed memory
would stay allocated until the device catches up: only a loaded tensor that another stream uses is recorded.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_tiled._log import warn

ALIGNMENT = mmap.PAGESIZE  # buffers and places begin and end at multiples of this, as O_DIRECT requires
PIECE = 64 * 2**20  # the most bytes of one allocation; all are powers of two, as torch rounds pinned memory up to one


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Buffer:
    """CPU memory for one tensor, in use while this object is alive. See NOTE [Rooms]."""

    nbytes: int
    pieces: list[Tensor]


class Stored(NamedTuple):
    """Bytes that are being stored in a room."""

    room: Any
    done: Callable[[], bool]
    wait: Callable[[], None]


class Copy:
    """A copy between a tensor and a buffer. A GPU runs it until its ``end`` has passed; other copies have ended."""

    def __init__(self, tensor: Tensor, room: Buffer, end: torch.cuda.Event | None) -> None:
        self.room, self.end, self.device = room, end, tensor.device
        self.tensor: Tensor | None = tensor  # until it is stored, or loaded

    def done(self) -> bool:
        return self.end is None or self.end.query()

    def wait(self) -> None:
        """Let the host wait until it has ended."""
        if self.end is not None:
            with torch.cuda.device(self.device):  # on a thread another one is current, which would get a context
                self.end.synchronize()

    def stored(self) -> None:
        """Wait, and drop the tensor."""
        self.wait()
        self.tensor = None

    def loaded(self) -> Tensor:
        """Return the tensor, which the current stream may use."""
        tensor = self.tensor
        assert tensor is not None
        if self.end is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.end)
            tensor.record_stream(stream)  # it may be another than that for which the tensor was allocated
        self.tensor = None
        return tensor


class CPUMemory:
    """The tier in CPU memory, up to a budget in bytes. What is free is kept for the next step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._pin = True
        self._buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: deque[Copy] = deque()
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # pieces by size

    def store(self, raw: Tensor, after: torch.cuda.Event | None) -> Stored | None:
        """Begin to copy bytes to a buffer once an event has passed; return ``None`` if the budget has no room."""
        buffer = self.take(raw.nbytes, raw.device)
        if buffer is None:
            return None
        copy = self._copy("store", raw, buffer, after)
        return Stored(buffer, copy.done, copy.stored)

    def load(self, room: Buffer, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        """Begin to copy bytes from a buffer. Return a function that waits for them."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._copy("load", into, room, event_now(into)).loaded

    def take(self, nbytes: int, device: torch.device) -> Buffer | None:
        """Return a buffer, pinned if the device is a GPU, or ``None`` if the budget has no room."""
        while self._running and self._running[0].done():
            self._running.popleft()
        size = aligned(nbytes)
        if self._room() < size:
            self._wait_for_copies()  # whose buffers may be free after them
        if self._room() < size:
            return None
        buffer = Buffer(size, [])
        self._buffers.add(buffer)
        while size:
            piece = self._take_piece(min(PIECE, 1 << size.bit_length() - 1), device)
            buffer.pieces.append(piece)
            weakref.finalize(buffer, self._free[piece.nbytes].append, piece)
            size -= piece.nbytes
        return buffer

    def _room(self) -> int:
        return self.budget - sum(buffer.nbytes for buffer in self._buffers)

    def _take_piece(self, size: int, device: torch.device) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        if self._room() < sum(free * len(pieces) for free, pieces in self._free.items()):
            self._free.clear()  # lengths have changed: what is free has other sizes
        if device.type == "cuda" and self._pin:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:
                self._pin = False
                warn("The system refuses to pin CPU memory (see ulimit -l): copies to it are slower and block.")
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def _copy(self, verb: str, tensor: Tensor, buffer: Buffer, after: torch.cuda.Event | None) -> Copy:
        """Begin to copy a tensor to a buffer, or back. Only a GPU copies in the background."""
        device = tensor.device
        if after is None:
            _copy_pieces(verb, tensor, buffer)
            return Copy(tensor, buffer, None)
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_event(after)
            copy = Copy(tensor, buffer, torch.cuda.Event(blocking=True))
            try:
                with torch.cuda.stream(stream):
                    _copy_pieces(verb, tensor, buffer)
                stream.record_event(copy.end)
                self._running.append(copy)
            except BaseException:  # after Ctrl-C, nothing else knows of a copy that has begun
                stream.synchronize()
                raise
        return copy

    def _wait_for_copies(self) -> None:
        while self._running:
            self._running[0].wait()
            self._running.popleft()

    def close(self) -> None:
        """Return memory that is not in use to the system."""
        self._wait_for_copies()
        self._free.clear()
        if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):  # since torch 2.12
            torch.accelerator.empty_host_cache()


def _copy_pieces(verb: str, tensor: Tensor, buffer: Buffer) -> None:
    start = 0
    for piece in buffer.pieces:
        part = tensor[start : start + piece.nbytes]
        start += piece.nbytes
        if verb == "store":
            piece[: part.nbytes].copy_(part, non_blocking=tensor.is_cuda)
        else:
            part.copy_(piece[: part.nbytes], non_blocking=tensor.is_cuda)


def event_now(tensor: Tensor) -> torch.cuda.Event | None:
    """Return an event after the current stream's work so far, if the tensor is on a GPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
