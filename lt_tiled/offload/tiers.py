"""The tiers: CPU memory and disk. A tier stores bytes and loads them again; it does not know autograd graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from lt_tiled._log import inform
from lt_tiled.errors import OffloadError
from lt_tiled.memory import gib
from lt_tiled.offload.extents import Extent
from lt_tiled.offload.pinned import CPUMemory, Slot
from lt_tiled.offload.spill import SpillFile, wait_for
from lt_tiled.policies import MAX_BYTES

Tier: TypeAlias = "CPUTier | DiskTier"


@dataclass(frozen=True)
class Stored:
    """Where bytes are stored, or being stored. Their room is free when nothing refers to it."""

    tier: Tier
    room: Any  # a Slot or an Extent
    done: Callable[[], bool]
    wait: Callable[[], None]


@dataclass(frozen=True)
class Loading:
    """Bytes that are being loaded to their device."""

    into: Tensor
    finish: Callable[[], object]

    def wait(self) -> Tensor:
        """Return the bytes, which the current stream may use."""
        self.finish()
        if self.into.is_cuda:  # it may be another stream than that for which the tensor was allocated
            self.into.record_stream(torch.cuda.current_stream(self.into.device))
        return self.into


class CPUTier(CPUMemory):
    """CPU memory up to a budget in bytes."""

    def store(self, raw: Tensor) -> Stored | None:
        """Begin to copy bytes; return ``None`` if the budget has no room."""
        if (slot := self.take(raw.nbytes, raw.device)) is None:
            return None
        _tell_if_it_blocks(raw.device)
        copy = self.copy("store", raw, slot)
        return Stored(self, slot, copy.done, copy.wait)

    def load(self, room: Slot, nbytes: int, device: torch.device) -> Loading:
        """Begin to load the bytes in ``room``. May be called any number of times."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return Loading(into, self.copy("load", into, room).wait_on_stream)


class DiskTier:
    """A spill file. GPUs write and read it through pinned memory, other devices through CPU tensors."""

    def __init__(self, spill: SpillFile) -> None:
        # The number of tensors in flight bounds the memory.
        self.spill, self.memory = spill, CPUMemory(MAX_BYTES)

    def store(self, raw: Tensor) -> Stored:
        extent = self.spill.take(raw.nbytes)
        if raw.is_cuda:
            slot = self._stage(raw)
            copy = self.memory.copy("store", raw, slot)
            # The call refers to the copy, and so keeps the slot until it has ended.
            call = self.spill.write(extent, _views(slot.memory), first=copy.wait)
        else:
            _tell_if_it_blocks(raw.device)
            source = raw if raw.device.type == "cpu" else torch.empty(raw.nbytes, dtype=torch.uint8).copy_(raw)
            call = self.spill.write(extent, _views([source]))
        return Stored(self, extent, call.done, partial(wait_for, call))

    def load(self, room: Extent, nbytes: int, device: torch.device) -> Loading:
        """Begin to read the bytes in ``room``. May be called any number of times."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if into.is_cuda:
            return self._load_to_gpu(room, into)
        buffer = into if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8)
        read = self.spill.read(room, _views([buffer]))

        def finish() -> None:
            wait_for(read)
            if buffer is not into:
                into.copy_(buffer)

        return Loading(into, finish)

    def _load_to_gpu(self, extent: Extent, into: Tensor) -> Loading:
        slot = self._stage(into)
        allocated = torch.cuda.current_stream(into.device).record_event()

        def copy_back() -> None:
            self.memory.copy("load", into, slot, allocated).wait()

        read = self.spill.read(extent, _views(slot.memory), then=copy_back)
        return Loading(into, partial(wait_for, read))

    def _stage(self, raw: Tensor) -> Slot:
        if (slot := self.memory.take(raw.nbytes, raw.device)) is None:
            reason = f"the system has no {gib(raw.nbytes)} of CPU memory to stage a tensor in"
            remedy = "lower cpu_budget, start fewer ranks on the node, or end other processes"
            raise OffloadError(f"{reason}: {remedy}", directory=self.spill.directory)
        return slot

    def free_buffers(self) -> None:
        self.memory.free_buffers()

    def close(self) -> None:
        self.spill.close()
        self.memory.close()


def _tell_if_it_blocks(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        kind = f"Offloading from {device.type} goes through CPU memory that is not pinned"
        inform(f"{kind}, and copies block: only those of CUDA and ROCm run in the background.", once=kind)


def _views(memory: Sequence[Tensor]) -> list[memoryview]:
    """Return the bytes of flat CPU tensors, which the views keep alive."""
    return [memoryview(cast(Any, piece.numpy())) for piece in memory]
