"""The offloader: sends saved tensors to a tier in the forward pass and returns them in the backward pass."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.errors import OffloadError, Origin, name_origin
from lt_tiled.memory import available_memory, gib
from lt_tiled.offload.geometry import Geometry, movable, view_key
from lt_tiled.offload.prefetch import OffloadedTensor, Prefetcher
from lt_tiled.offload.spill import SpillFile
from lt_tiled.offload.stats import OffloadStats
from lt_tiled.offload.tiers import CPUTier, DiskTier
from lt_tiled.policies import ActivationCheckpointing, parse_bytes

IN_FLIGHT, BYTES_IN_FLIGHT = 2, 4 * 2**30
"""At most 2 tensors of together at most 4 GiB are stored at a time; a single larger tensor is stored alone. The next
one waits for the oldest, so a slow disk costs time, not memory.
"""
MIN_BYTES = 2**20
"""Smaller tensors stay on the device: their transfer costs more time than their memory is worth."""


class Offloader:
    """Stores saved tensors in CPU memory, on disk, or in both, and loads them in reverse order. Thread-safe.

    A stored tensor is freed with the graph that saved it, whether or not the backward pass ran. With both tiers, the
    disk takes the tensors that exceed the CPU budget.
    """

    def __init__(self, policy: ActivationCheckpointing, cpu: CPUTier | None, disk: DiskTier | None) -> None:
        self.policy, self.cpu, self.disk = policy, cpu, disk
        self._tiers = [tier for tier in (cpu, disk) if tier is not None]
        self.min_bytes = MIN_BYTES
        self.prefetcher = Prefetcher(policy.prefetch)
        self.step = 0
        """Number of forward passes: incremented when a tensor is saved and none is alive."""
        self.stats = OffloadStats()
        """The figures since the last :meth:`end_step`."""
        self.total = OffloadStats()
        """The figures of all steps that ended."""
        self._lock = RLock()
        self._live: weakref.WeakValueDictionary[object, OffloadedTensor] = weakref.WeakValueDictionary()
        # Tensors that keep_last holds back until others follow, and tensors that are being stored: weak sets in the
        # order of saving.
        self._held_back: weakref.WeakKeyDictionary[OffloadedTensor, None] = weakref.WeakKeyDictionary()
        self._storing: weakref.WeakKeyDictionary[OffloadedTensor, None] = weakref.WeakKeyDictionary()
        self._last: Callable[[], OffloadedTensor | None] = lambda: None
        self._closed = False
        self._process = os.getpid()

    def pack(self, tensor: Tensor, block: str) -> Tensor | OffloadedTensor:
        """Offload a tensor and return what :meth:`unpack` turns into it again.

        One that is small or cannot be moved is returned as it is. Errors, also those of an earlier one that could not
        be stored, name the block that it belongs to.
        """
        if not movable(tensor) or Geometry.of(tensor).nbytes < self.min_bytes:
            return tensor
        with self._in_step(tensor.device):
            if not self._live:
                self.step += 1
            self._reap()
            # A tensor that several blocks save is stored once. Storages are compared as objects, because a freed
            # storage's address may be used again; x and x.t() are two tensors.
            identity = (weakref.ref(tensor.untyped_storage()), view_key(tensor), tensor._version)
            packed = self._live.get(identity)
            if packed is None:
                origin = Origin(self.step, block, tensor.shape, tensor.dtype)
                packed = self._live[identity] = OffloadedTensor(tensor, origin, self._last)
                self._last = weakref.ref(packed)
                self._held_back[packed] = None
                held_back = list(self._held_back)
                for oldest in held_back[: max(len(held_back) - self.policy.keep_last, 0)]:
                    del self._held_back[oldest]
                    self._store(oldest)
            return packed

    def unpack(self, packed: Tensor | OffloadedTensor) -> Tensor:
        """Return the tensor that was saved, with its values, strides and dtype."""
        if isinstance(packed, Tensor):
            return packed
        with self._in_step(packed.device, packed.origin):
            self._last = lambda: None  # the next packed tensor belongs to another forward pass
            self._reap()
            self._wait_for_stores(IN_FLIGHT, BYTES_IN_FLIGHT, wanted=packed)
            packed.check_unchanged()
            if (tensor := packed.tensor) is None:
                tensor = self._load(packed)
            self.prefetcher.load_ahead(packed)
            return tensor

    @contextmanager
    def _in_step(self, device: torch.device, origin: Origin | None = None) -> Iterator[None]:
        """Hold the lock, refuse calls that cannot work, and clean up after an error, which ends the step.

        After an error, tensors that are being stored stay in memory, so that the next step neither waits for them nor
        fails with them. Graphs that are not part of the step still have their values.
        """
        if device.type == "cuda":
            with torch.cuda.device(device):
                if torch.cuda.is_current_stream_capturing():
                    reason = "a step that offloads cannot be captured as a CUDA graph: set offload=None for that"
                    raise OffloadError(reason, origin=origin)
        with self._lock:
            if self._closed:
                reason = "the offloader was released before this graph's backward pass: release it afterwards"
                raise OffloadError(reason, origin=origin)
            if os.getpid() != self._process:
                reason = "this process is a fork of the one that offloads: train in the parent"
                raise OffloadError(reason, origin=origin)
            try:
                yield
            except OffloadError:
                self._held_back.clear()
                self._storing.clear()
                raise

    def _store(self, packed: OffloadedTensor) -> None:
        """Begin to store a tensor, or count it as one that stays."""
        self._wait_for_stores(IN_FLIGHT - 1, BYTES_IN_FLIGHT - packed.geometry.nbytes)
        stored = packed.store(self._tiers)
        if stored is None:
            if not (self.total.over_budget_bytes or self.stats.over_budget_bytes):
                share = f", {gib(self.cpu.budget)}," if isinstance(self.cpu, CPUTier) else ""  # the planner has others
                what = f"a tensor of {gib(packed.geometry.nbytes)} ({packed.origin})"
                remedy = "raise cpu_budget, or use offload='cpu+disk'"
                warn(f"This rank's share of cpu_budget{share} is full: {what} stays on {packed.device}; {remedy}.")
            self.stats.over_budget_bytes += packed.geometry.nbytes
            return
        if stored.tier is self.cpu:
            self.stats.cpu_bytes += packed.geometry.nbytes
        else:
            self.stats.disk_bytes += packed.geometry.nbytes
        self._storing[packed] = None
        self._reap()

    def _wait_for_stores(self, max_tensors: int, max_bytes: int, wanted: OffloadedTensor | None = None) -> None:
        """Wait until at most so many tensors, and bytes, are being stored, not counting ``wanted``."""
        while True:
            storing = [packed for packed in self._storing if packed is not wanted]
            nbytes = sum(tensor.nbytes for packed in storing if (tensor := packed.tensor) is not None)
            if not storing or (len(storing) <= max_tensors and nbytes <= max_bytes):
                return
            self._free(storing[0])

    def _reap(self) -> None:
        """Free the tensors whose bytes are stored by now."""
        for packed in list(self._storing):
            if packed.stored is not None and packed.stored.done():
                self._free(packed)

    def _free(self, packed: OffloadedTensor) -> None:
        """Wait until the bytes of a tensor are stored, and free it."""
        assert packed.stored is not None
        del self._storing[packed]
        try:
            with name_origin(packed.origin):
                packed.stored.wait()
        except OffloadError:
            if packed.origin.step == self.step:
                raise
            return  # of a step that ended in another error: only its own backward pass needs it
        packed.check_unchanged()
        packed.tensor = None

    def _load(self, packed: OffloadedTensor) -> Tensor:
        loading = packed.begin_loading()
        packed.loading = None
        with name_origin(packed.origin):
            return packed.geometry.rebuild(loading.wait())

    def so_far(self) -> OffloadStats:
        """Return the figures of all steps, including the current one."""
        with self._lock:
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
            for packed in list(self._live.values()):
                packed.tensor = packed.loading = None
            for tier in self._tiers:
                try:
                    tier.close()
                except Exception as error:  # of CUDA, for example; the error that ended the run is more important
                    warn(f"Releasing memory and disk space failed: {error}")


def build_offloader(policy: ActivationCheckpointing, ranks_per_node: int | None = None) -> Offloader:
    """Open the tiers of a policy with ``offload`` set.

    ``ranks_per_node`` processes share a node's budgets: by default the launcher's number, else all ranks.
    """
    assert policy.offload is not None
    all_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    ranks = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", all_ranks))  # torchrun sets it
    cpu = disk = None
    if "cpu" in policy.offload:
        budget = available_memory() // 2 if policy.cpu_budget is None else parse_bytes(policy.cpu_budget, "cpu_budget")
        cpu = CPUTier(budget // ranks)
    if "disk" in policy.offload:
        limit = None if policy.disk_budget is None else parse_bytes(policy.disk_budget, "disk_budget") // ranks
        directory = os.path.expanduser(policy.directory or tempfile.gettempdir())
        disk = DiskTier(SpillFile(directory, limit, direct=policy.direct_io))
    return Offloader(policy, cpu, disk)
