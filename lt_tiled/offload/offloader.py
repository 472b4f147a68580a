"""The offloader: sends saved tensors to a tier in the forward pass and returns them in the backward pass."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.errors import OffloadError, Origin, name_origin
from lt_tiled.memory import gib
from lt_tiled.offload.geometry import Geometry, movable, raw_bytes, view_key
from lt_tiled.offload.pinned import available_memory
from lt_tiled.offload.prefetch import OffloadedTensor, Prefetcher
from lt_tiled.offload.spill import WAIT_SECONDS, SpillFile
from lt_tiled.offload.stats import OffloadStats, StallClock
from lt_tiled.offload.tiers import CPUTier, DiskTier
from lt_tiled.policies import Checkpointing, parse_bytes

IN_FLIGHT, BYTES_IN_FLIGHT = 2, 4 * 2**30
"""The most tensors, and the most bytes of two, that are being stored at once. The next one waits for the oldest. One
tensor may be larger, and the backward pass waits until it is stored. So a slow disk costs time, not memory.
"""


class Offloader:
    """Stores saved tensors in CPU memory, on disk, or in both, and loads them in reverse order. Thread-safe.

    A stored tensor is freed with the graph that saved it, whether or not the backward pass ran.

    Args:
        policy: Sets which tensors stay on the device, and how many to load ahead.
        cpu: The CPU memory tier, if there is one.
        disk: The disk tier, if there is one; with both, it takes the tensors that exceed the CPU budget.
    """

    def __init__(self, policy: Checkpointing, cpu: CPUTier | None, disk: DiskTier | None) -> None:
        self.policy, self.cpu, self.disk = policy, cpu, disk
        self._tiers = [tier for tier in (cpu, disk) if tier is not None]
        self.min_bytes = parse_bytes(policy.min_bytes, "min_bytes")
        self.prefetcher = Prefetcher(policy.prefetch)
        self.step = 0
        """Counts how often a tensor was saved while no other was: in training, the forward passes."""
        self.stats = OffloadStats()
        """The figures since the last :meth:`end_step`."""
        self.total = OffloadStats()
        """The figures of all steps that ended."""
        self.clock = StallClock()
        self.wait_seconds = WAIT_SECONDS
        self._lock = RLock()
        self._live: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()
        self._kept: deque[weakref.ref[OffloadedTensor]] = deque()
        self._leaving: deque[weakref.ref[OffloadedTensor]] = deque()
        self._last: Callable[[], OffloadedTensor | None] = lambda: None
        self._known: weakref.WeakValueDictionary[object, OffloadedTensor] = weakref.WeakValueDictionary()
        self._closed = False
        self._process = os.getpid()

    def pack(self, tensor: Tensor, block: str) -> Tensor | OffloadedTensor:
        """Offload a tensor and return what :meth:`unpack` turns into it again.

        Args:
            tensor: Any tensor; one that is small or cannot be moved is returned as it is.
            block: The block that it belongs to, as errors name it.

        Raises:
            OffloadError: If this tensor or an earlier one could not be stored, or a CUDA graph is being captured.
        """
        if not movable(tensor) or Geometry.of(tensor).nbytes < self.min_bytes:
            return tensor
        _refuse_capture(tensor.device)
        with self._lock, self._ending_the_step():
            self._check_usable()
            if not self._live:
                self.step += 1
            self._reap()
            # A tensor that several blocks save is stored once. Storages are compared as objects, because a freed
            # storage's address may be used again; x and x.t() are two tensors.
            identity = (view_key(tensor), tensor._version)
            known = self._known.get(identity)
            if known is not None and known.storage() is tensor.untyped_storage():
                return known
            origin = Origin(self.step, block, tensor.shape, tensor.dtype)
            packed = self._known[identity] = OffloadedTensor(tensor, origin, self._last)
            self._last = weakref.ref(packed)
            self._live.add(packed)
            self._kept.append(self._last)
            while len(self._kept) > self.policy.keep_last:
                if (oldest := self._kept.popleft()()) is not None:
                    self._store(oldest)
            return packed

    def unpack(self, packed: Tensor | OffloadedTensor) -> Tensor:
        """Return the tensor that was saved, with its values, strides and dtype.

        Raises:
            OffloadError: If it cannot be restored, or a CUDA graph is being captured.
        """
        if isinstance(packed, Tensor):
            return packed
        _refuse_capture(packed.device)
        with self._lock, self._ending_the_step():
            self._check_usable(packed.origin)
            self._last = lambda: None  # the next packed tensor belongs to another forward pass
            self._reap()
            self._let_leave(IN_FLIGHT, BYTES_IN_FLIGHT, wanted=packed)
            tensor = packed.in_memory()
            if tensor is not None:
                self.stats.from_memory += 1
            else:
                tensor = self.prefetcher.load(packed, self.wait_seconds, self.stats, self.clock)
            self.prefetcher.load_ahead(packed)
            return tensor

    @contextmanager
    def _ending_the_step(self) -> Iterator[None]:
        """Forget what is being stored if an error ends the step, so that the next step does not wait for it or fail.

        Those tensors stay in memory, which is right for graphs that are not part of the step.
        """
        try:
            yield
        except OffloadError:
            self._kept.clear()
            self._leaving.clear()
            raise

    def _store(self, packed: OffloadedTensor) -> None:
        """Begin to store a tensor on the first tier that has room."""
        packed.check_version()
        self._let_leave(IN_FLIGHT - 1, BYTES_IN_FLIGHT - packed.geometry.nbytes)
        assert packed.tensor is not None
        if packed.computed is not None and (stream := torch.cuda.current_stream(packed.device)) != packed.stream:
            stream.wait_event(packed.computed)
            packed.tensor.record_stream(stream)
        compress = self.policy.compress and packed.tensor.dtype == torch.float32
        source = packed.tensor.to(torch.bfloat16) if compress else packed.tensor
        raw = raw_bytes(source)
        with name_origin(packed.origin):
            for tier in self._tiers:
                packed.stored = packed.stored or tier.store(raw)
        if packed.stored is None:
            if not (self.total.kept_bytes or self.stats.kept_bytes):
                what = f"a tensor of {gib(packed.geometry.nbytes)} ({packed.origin})"
                remedy = "raise cpu_budget, or use offload='cpu+disk'"
                warn(f"cpu_budget={self.policy.cpu_budget} is full: {what} stays on {raw.device}; {remedy}.")
            self.stats.kept_bytes += packed.geometry.nbytes
            return
        packed.geometry = Geometry.of(source)
        if packed.stored.tier == "cpu":
            self.stats.cpu_bytes += raw.nbytes
        else:
            self.stats.disk_bytes += raw.nbytes
        self._leaving.append(weakref.ref(packed))
        self._reap()

    def _let_leave(self, tensors: int, nbytes: int, wanted: OffloadedTensor | None = None) -> None:
        """Wait until at most so many tensors, and bytes, are being stored, not counting ``wanted``."""
        while True:
            leaving = [p for r in self._leaving if (p := r()) is not None and p is not wanted]
            there = sum(t.nbytes for p in leaving if (t := p.tensor) is not None)
            if not leaving or (len(leaving) <= tensors and there <= nbytes):
                return
            assert leaving[0].stored is not None
            with name_origin(leaving[0].origin), self.clock.waiting(leaving[0].device, self.stats):
                leaving[0].stored.settle(self.wait_seconds)
            self._reap()

    def _reap(self) -> None:
        """Free the tensors whose bytes are stored.

        Raises:
            OffloadError: If one could not be stored, or was changed in place before it was.
        """
        self.clock.read(self.stats)
        for reference in list(self._leaving):
            packed = reference()
            if packed is None:
                self._leaving.remove(reference)
            elif packed.stored is not None and packed.stored.settled():
                self._leaving.remove(reference)
                packed.check_version()
                try:
                    with name_origin(packed.origin):
                        packed.stored.settle(0)
                except OffloadError:
                    if packed.origin.step == self.step:
                        raise
                    continue  # of a step that ended in another error: only its own backward pass needs it
                packed.tensor = None

    def _check_usable(self, origin: Origin | None = None) -> None:
        if self._closed:
            reason = "the offloader was released before this graph's backward pass: release it afterwards"
            raise OffloadError(reason, origin=origin)
        if os.getpid() != self._process:
            raise OffloadError("this process is a fork of the one that offloads: train in the parent", origin=origin)

    def so_far(self) -> OffloadStats:
        """Return the figures of all steps, including the current one."""
        with self._lock:
            if not self._closed:
                self.clock.read(self.stats)
            return self.total + self.stats

    def end_step(self) -> OffloadStats:
        """Return the figures since the last call, and add them to the total."""
        with self._lock:
            self.total = self.so_far()
            stats, self.stats = self.stats, OffloadStats()
            return stats

    def free_buffers(self) -> None:
        """Return unused CPU memory to the system; the next tensor allocates it again."""
        with self._lock:
            for tier in self._tiers:
                tier.free_buffers()

    def close(self) -> None:
        """Stop all copies and free CPU memory and disk space. Graphs that are still alive have no backward pass."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for packed in list(self._live):
                packed.tensor = packed.loading = None
            for tier in self._tiers:
                try:
                    tier.close()
                except Exception as error:  # of CUDA, for example; the error that ended the run is more important
                    warn(f"Releasing memory and disk space failed: {error}")


def _refuse_capture(device: torch.device) -> None:
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise OffloadError("a step that offloads cannot be captured as a CUDA graph: set offload=None for that")


def build_offloader(policy: Checkpointing, ranks_per_node: int | None = None) -> Offloader:
    """Open the tiers of a policy.

    Args:
        policy: A policy with ``offload`` set.
        ranks_per_node: Processes that share a node's budgets; by default the launcher's number, else all ranks.

    Raises:
        OffloadDiskFullError: If the disk has no room for ``disk_budget``.
        OffloadError: If the directory cannot be used.
    """
    assert policy.offload is not None
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    ranks = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))  # torchrun sets it
    cpu = disk = None
    if "cpu" in policy.offload:
        budget = available_memory() // 2 if policy.cpu_budget is None else parse_bytes(policy.cpu_budget, "cpu_budget")
        cpu = CPUTier(budget // ranks)
    if "disk" in policy.offload:
        limit = None if policy.disk_budget is None else parse_bytes(policy.disk_budget, "disk_budget") // ranks
        directory = os.path.expanduser(policy.directory or tempfile.gettempdir())
        disk = DiskTier(SpillFile(directory, limit, direct=policy.direct_io, checksum=policy.checksum))
    return Offloader(policy, cpu, disk)
