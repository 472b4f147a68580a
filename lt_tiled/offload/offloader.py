"""The offloader: sends saved tensors to a tier in the forward pass and returns them in the backward pass.

* A **record** (:class:`OffloadedTensor`) takes the place of a tensor in the graph that saved it, and goes with that
  graph, however the step ends. The records that wait for their backward pass stand in one list, as they were saved.
* A **tier** holds bytes: CPU memory (``pinned.py``) or a file (``disk.py``).
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import RLock
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.errors import OffloadError, Origin, name_origin
from lt_tiled.memory import available_memory, gib
from lt_tiled.offload.disk import Disk
from lt_tiled.offload.pinned import CPUMemory, Stored, event_now
from lt_tiled.offload.tensors import movable, raw_bytes, view_key
from lt_tiled.policies import ActivationCheckpointing, parse_bytes

Tier: TypeAlias = CPUMemory | Disk
IN_FLIGHT = 2  # tensors that are stored at a time: the next one waits, so that a slow disk costs time, not memory
MOST_BYTES = 4 * 2**30  # that are loaded ahead
MIN_BYTES = 2**20  # smaller tensors stay on the device: their transfer costs more time than their memory is worth


@dataclass
class OffloadStats:
    """Bytes over all steps."""

    cpu_bytes: int = 0  # moved to CPU memory
    disk_bytes: int = 0  # written to disk, which wears an SSD
    over_budget_bytes: int = 0  # stayed on the device because the budget had no room

    def metrics(self) -> dict[str, float]:
        return {f"lt_tiled/offload_{name}": float(value) for name, value in asdict(self).items()}


class OffloadedTensor:
    """The record of one saved tensor; ``kept`` says that it is kept for the recompute, besides the block's inputs."""

    def __init__(self, tensor: Tensor, origin: Origin, kept: bool) -> None:
        self.origin, self.kept, self.device = origin, kept, tensor.device
        # A storage is compared as an object, because the address of a freed one may be used again.
        self.identity = weakref.ref(tensor.untyped_storage()), view_key(tensor), tensor._version
        self.nbytes = raw_bytes(tensor).nbytes
        self._layout = tensor.shape, tensor.stride()
        self._version = tensor._version
        self._computed = event_now(tensor)
        # The tensor itself, until it is stored: detached, as the grad_fn of a saved output leads back to its graph.
        self.tensor: Tensor | None = tensor.detach()
        self.was_sent = False  # whether storing was attempted; without a tier the tensor stays on the device
        self.tier: Tier | None = None
        self.stored: Stored | None = None
        self._loading: Callable[[], Tensor] | None = None
        self.uses = 0  # how often it was returned to a backward pass

    def store(self, tiers: Sequence[Tier]) -> None:
        """Begin to store it on the first tier that has room."""
        assert self.tensor is not None
        self.was_sent = True
        for tier in tiers:
            with name_origin(self.origin):
                self.stored = tier.store(raw_bytes(self.tensor), self._computed)
            if self.stored is not None:
                self.tier = tier
                return

    def is_stored(self) -> bool:
        return self.stored is not None and self.stored.done()

    def free(self) -> None:
        """Wait until the bytes are stored, and free the tensor."""
        assert self.stored is not None
        with name_origin(self.origin):
            self.stored.wait()
        self.check_unchanged()
        self.tensor = None

    def check_unchanged(self) -> None:
        """Raise :class:`OffloadError` if the tensor was changed in place while its bytes were not stored yet."""
        if self.tensor is not None and (now := self.tensor._version) != self._version:
            reason = f"a tensor was changed in place after it was saved (version {self._version}, now {now})"
            raise OffloadError(f"{reason}: make the change out of place", origin=self.origin)

    def begin_loading(self) -> Callable[[], Tensor]:
        """Begin to load the bytes unless that began earlier, and return what waits for them."""
        if self._loading is None:
            assert self.tier is not None
            assert self.stored is not None
            with name_origin(self.origin):
                self._loading = self.tier.load(self.stored.room, self.nbytes, self.device)
        return self._loading

    def load(self) -> Tensor:
        """Return the tensor from its bytes."""
        loading = self.begin_loading()
        self._loading = None  # the tensor lives as long as the backward pass uses it
        with name_origin(self.origin):
            raw = loading()
        shape, stride = self._layout
        return raw.view(self.origin.dtype).as_strided(shape, stride)


class Offloader:
    """Stores saved tensors in CPU memory, or on disk where its budget ends, and loads them again. Thread-safe."""

    def __init__(self, policy: ActivationCheckpointing, cpu: CPUMemory | None, disk: Disk | None) -> None:
        self.policy, self.cpu, self.disk = policy, cpu, disk
        self._tiers: list[Tier] = [tier for tier in (cpu, disk) if tier is not None]
        self.min_bytes = MIN_BYTES
        self.step = 0  # the number of forward passes that began when no other one waited
        self.stats = OffloadStats()
        self._lock = RLock()
        self._waiting: list[weakref.ref[OffloadedTensor]] = []
        self._closed = False
        self._process = os.getpid()

    def pack(self, tensor: Tensor, block: str, kept: bool = False) -> Tensor | OffloadedTensor:
        """Offload a tensor, and return what :meth:`unpack` turns into it again. An error may concern an earlier one."""
        if not movable(tensor) or raw_bytes(tensor).nbytes < self.min_bytes:
            return tensor
        with self._in_step():
            waiting = self.waiting()
            self.step += not waiting
            record = OffloadedTensor(tensor, Origin(self.step, block, tensor.shape, tensor.dtype), kept)
            for other in waiting:
                if other.identity == record.identity:  # several blocks save this tensor, which is stored once
                    return other
            self._waiting.append(weakref.ref(record))
            waiting.append(record)
            # The backward pass needs the last block inputs first: they stay, with what their blocks keep.
            end = len(waiting)
            inputs = self.policy.keep_last
            while end and inputs:
                end -= 1
                inputs -= not waiting[end].kept
            for earlier in waiting[:end]:
                if not earlier.was_sent:
                    self._settle(waiting, IN_FLIGHT - 1)
                    earlier.store(self._tiers)
                    self._count(earlier)
            return record

    def unpack(self, packed: Tensor | OffloadedTensor) -> Tensor:
        """Return the tensor that was saved, with its values, strides and dtype."""
        if isinstance(packed, Tensor):
            return packed
        with self._in_step(packed.origin):
            waiting = self.waiting()
            self._settle(waiting, IN_FLIGHT)
            packed.check_unchanged()
            packed.uses += 1
            tensor = packed.load() if packed.tensor is None else packed.tensor
            self._load_ahead(packed, waiting)
            return tensor

    def waiting(self) -> list[OffloadedTensor]:
        """Return the records whose graphs are alive, in the order of saving."""
        records = [record for reference in self._waiting if (record := reference()) is not None]
        self._waiting = list(map(weakref.ref, records))
        return records

    @contextmanager
    def _in_step(self, origin: Origin | None = None) -> Iterator[None]:
        """Hold the lock, and refuse calls that cannot work. After an error the next step does not wait for records."""
        with self._lock:
            if self._closed:
                raise OffloadError("released before this graph's backward pass: release afterwards", origin=origin)
            if os.getpid() != self._process:
                raise OffloadError("this process is a fork of the one that offloads: train there", origin=origin)
            try:
                yield
            except OffloadError:
                self._waiting.clear()
                raise

    def _settle(self, waiting: Sequence[OffloadedTensor], most: int) -> None:
        """Free the tensors that are stored by now, and the oldest until at most so many are being stored."""
        storing = [record for record in waiting if record.stored is not None and record.tensor is not None]
        for number, record in enumerate(storing):
            if len(storing) - number > most or record.is_stored():
                record.free()

    def _count(self, record: OffloadedTensor) -> None:
        """Add a tensor that is being stored, or stays, to the figures."""
        if record.tier is None:
            if not self.stats.over_budget_bytes:
                text = f"a tensor of {gib(record.nbytes)} ({record.origin}) stays on {record.device}"
                remedy = "raise cpu_budget, or use offload='cpu+disk'"
                warn(f"This rank's share of cpu_budget is full: {text}; {remedy}.")
            self.stats.over_budget_bytes += record.nbytes
        elif record.tier is self.cpu:
            self.stats.cpu_bytes += record.nbytes
        else:
            self.stats.disk_bytes += record.nbytes

    def _load_ahead(self, used: OffloadedTensor, waiting: Sequence[OffloadedTensor]) -> None:
        """Begin to load what the backward pass needs next: ``prefetch`` block inputs, with what their blocks keep."""
        if used not in waiting:
            return  # of a step that ended in an error
        end = waiting.index(used) + 1
        while end < len(waiting) and waiting[end].kept:  # the rest of its own block
            end += 1
        inputs = 0
        nbytes = 0
        for record in reversed(waiting[:end]):
            if record.tensor is not None or record.uses >= used.uses:
                continue
            nbytes += record.nbytes
            if nbytes > MOST_BYTES or inputs == self.policy.prefetch:
                return
            record.begin_loading()
            inputs += not record.kept

    def close(self) -> None:
        """Stop all copies and free CPU memory and disk space. Graphs that are still alive have no backward pass."""
        with self._lock:
            self._closed = True
            for tier in self._tiers:
                try:
                    tier.close()
                except Exception as error:  # of CUDA, for example; the error that ended the run is more important
                    warn(f"Releasing memory and disk space failed: {error}")


def build_offloader(policy: ActivationCheckpointing, ranks_per_node: int | None = None) -> Offloader:
    """Open the tiers of a policy with ``offload`` set.

    ``ranks_per_node`` processes share a node's budgets: by default the launcher's number, else all ranks.

    Raises:
        ValueError: If the launcher's number is none.
    """
    assert policy.offload is not None
    ranks = ranks_per_node
    if ranks is None:
        all_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        launched = os.environ.get("LOCAL_WORLD_SIZE", str(all_ranks))  # torchrun sets it
        if not launched.isdecimal() or int(launched) < 1:
            raise ValueError(f"LOCAL_WORLD_SIZE={launched!r} must be the number of ranks of this node: unset it.")
        ranks = int(launched)
    cpu = disk = None
    if "cpu" in policy.offload:
        budget = available_memory() // 2 if policy.cpu_budget is None else parse_bytes(policy.cpu_budget, "cpu_budget")
        cpu = CPUMemory(budget // ranks)
    if "disk" in policy.offload:
        limit = None if policy.disk_budget is None else parse_bytes(policy.disk_budget, "disk_budget") // ranks
        disk = Disk(os.path.expanduser(policy.directory or tempfile.gettempdir()), limit, direct=policy.direct_io)
    return Offloader(policy, cpu, disk)
