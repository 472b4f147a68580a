"""The offloader: packs boundaries in the forward, sends them away, and has them back in time for the backward."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Literal, TypeVar

import torch
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.errors import OffloadError, Origin
from lt_tiled.offload.geometry import Geometry, movable, raw_bytes
from lt_tiled.offload.stats import OffloadStats
from lt_tiled.offload.tiers import DiskTier, Loading, RamTier, Stored

IN_FLIGHT = 2
"""Boundaries on their way out at once. The next one waits for the oldest: a slow disk costs time, not memory."""
MAX_PREFETCH = 8
"""The most boundaries that ``prefetch="auto"`` has on their way back at once."""
STALL_SECONDS = 1e-3
"""A longer wait is a stall, and ``prefetch="auto"`` looks one boundary further ahead from then on."""
WAIT_SECONDS = 300.0
"""No wait is longer than this."""

Waited = TypeVar("Waited")


class Boundary:
    """One packed tensor: what autograd holds in its place. Its space is given back when the graph is gone."""

    def __init__(self, tensor: Tensor, origin: Origin, previous: Boundary | None) -> None:
        self.origin = origin
        self.geometry = Geometry.of(tensor)
        # Without its history: a saved output's leads back to the node that holds this record.
        self.tensor: Tensor | None = tensor.detach()
        """The tensor itself, until its bytes are safe elsewhere."""
        self.version = tensor._version
        self.narrow: Geometry | None = None
        """The geometry of what was stored, if that was rounded to bfloat16."""
        self.stored: Stored | None = None
        self.loading: Loading | None = None
        self.previous = weakref.ref(previous) if previous is not None else lambda: None

    def __del__(self) -> None:
        if self.stored is not None:
            self.stored.free()


class Offloader:
    """Sends tensors to RAM, to disk, or to RAM and then disk, in the order in which they are packed, and back in the
    opposite order.

    Records belong to their graph: they are freed with it, whether it was run backward or not. May be used from several
    threads, as autograd's.

    Args:
        device: Where the tensors are, which decides how they are copied.
        ram: The RAM tier, if there is one.
        disk: The disk tier, if there is one; with both, it takes what the RAM has no room for.
        prefetch: Boundaries on their way back at once, or ``"auto"``: one more after each stall.
        keep_last: This many boundaries stay where they are, because the backward asks for the last ones first.
        min_bytes: Smaller tensors stay where they are.
        compress: Send float32 as bfloat16, which rounds them.
    """

    def __init__(
        self,
        *,
        ram: RamTier | None,
        disk: DiskTier | None,
        prefetch: int | Literal["auto"] = "auto",
        keep_last: int = 1,
        min_bytes: int = 0,
        compress: bool = False,
    ) -> None:
        self.ram = ram
        self.disk = disk
        self.min_bytes = min_bytes
        self.keep_last = keep_last
        self.compress = compress
        self.adaptive = prefetch == "auto"
        self.depth = 1 if prefetch == "auto" else prefetch
        self.step = 0
        """Counts the times that the offloader began anew with nothing packed: forward passes, in training."""
        self.stats = OffloadStats()
        """Since the last :meth:`end_step`."""
        self.total = OffloadStats()
        """Of all steps that ended."""
        self.wait_seconds = WAIT_SECONDS
        self._lock = RLock()
        self._live: weakref.WeakSet[Boundary] = weakref.WeakSet()
        self._held: deque[weakref.ref[Boundary]] = deque()
        self._leaving: deque[weakref.ref[Boundary]] = deque()
        self._coming: list[weakref.ref[Boundary]] = []
        self._last: weakref.ref[Boundary] | None = None
        self._known: dict[tuple[object, ...], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[Boundary]]] = {}
        self._closed = False
        self._told = False
        self._process = os.getpid()

    # Forward

    def pack(self, tensor: Tensor, block: str) -> Tensor | Boundary:
        """Take a tensor over: what is returned stands for it until :meth:`unpack`.

        Args:
            tensor: Any tensor; one that is small or cannot be moved is returned as it is.
            block: The name that errors give to where it comes from.

        Raises:
            OffloadError: If an earlier tensor could not be stored, or this one not.
        """
        if not movable(tensor) or Geometry.of(tensor).nbytes < self.min_bytes:
            return tensor
        with self._lock:
            self._check_usable()
            if not self._live:
                self.step += 1
                self._known.clear()
            self._reap()
            if (known := self._find(tensor)) is not None:
                return known
            previous = self._last() if self._last is not None else None
            boundary = Boundary(tensor, Origin(self.step, block, tensor.shape, tensor.dtype), previous)
            self._last = weakref.ref(boundary)
            self._live.add(boundary)
            self._remember(tensor, boundary)
            self._held.append(weakref.ref(boundary))
            while len(self._held) > self.keep_last:
                if (oldest := self._held.popleft()()) is not None:
                    self._send(oldest)
            return boundary

    def _find(self, tensor: Tensor) -> Boundary | None:
        """The record of the same values, if another block packed them: a shared tensor moves once.

        The storage is compared as an object, not by its address, which the next tensor may have; and so are offset,
        strides and
        version: ``x`` and ``x.t()`` are two tensors.
        """
        storage, boundary = self._known.get(_identity(tensor), (None, None))
        if storage is None or boundary is None or storage() is not tensor.untyped_storage():
            return None
        return boundary()

    def _remember(self, tensor: Tensor, boundary: Boundary) -> None:
        if len(self._known) > 2 * len(self._live) + 64:
            self._known = {key: refs for key, refs in self._known.items() if refs[1]() is not None}
        self._known[_identity(tensor)] = (weakref.ref(tensor.untyped_storage()), weakref.ref(boundary))

    def _send(self, boundary: Boundary) -> None:
        """Begin to move a boundary to the first tier that has room."""
        tensor = boundary.tensor
        assert tensor is not None
        self._check_version(boundary)
        self._await_room(boundary)
        if self.compress and tensor.dtype == torch.float32:
            tensor = tensor.to(torch.bfloat16)
            boundary.narrow = Geometry.of(tensor)
        raw = raw_bytes(tensor)
        try:
            boundary.stored = (self.ram.store(raw) if self.ram else None) or (
                self.disk.store(raw) if self.disk else None
            )
        except OffloadError as error:
            raise error.of(boundary.origin) from error.__cause__
        if boundary.stored is None:
            boundary.narrow = None
            self.stats.kept_bytes += boundary.geometry.nbytes
            self._tell_once(
                f"The cpu_budget has no room for a boundary ({boundary.origin}): it stays on {tensor.device}. Raise the budget."
            )
            return
        if boundary.stored.tier == "cpu":
            self.stats.cpu_bytes += raw.nbytes
        else:
            self.stats.disk_bytes += raw.nbytes
        self._leaving.append(weakref.ref(boundary))
        self._reap()

    def _await_room(self, boundary: Boundary) -> None:
        """Wait until no more than the allowed number of boundaries are on their way out."""
        while len(self._leaving) >= IN_FLIGHT:
            oldest = self._leaving[0]()
            if oldest is not None and oldest.stored is not None:
                self._timed(oldest.stored.settle, oldest)
            self._reap()

    def _reap(self) -> None:
        """Let go of tensors whose bytes have arrived.

        Raises:
            OffloadError: If some could not be stored, or were changed in place on the way.
        """
        for reference in list(self._leaving):
            boundary = reference()
            if boundary is None:
                self._leaving.remove(reference)
            elif boundary.stored is not None and boundary.stored.settled():
                self._leaving.remove(reference)
                self._check_version(boundary)
                try:
                    boundary.stored.settle(0)
                except OffloadError as error:
                    raise error.of(boundary.origin) from error.__cause__
                boundary.tensor = None

    # Backward

    def unpack(self, packed: Tensor | Boundary) -> Tensor:
        """The tensor that was packed, with its values, strides and dtype.

        Raises:
            OffloadError: If it cannot be had back as it was.
        """
        if isinstance(packed, Tensor):
            return packed
        with self._lock:
            self._check_usable(packed.origin)
            self._last = None  # what is packed from now on belongs to another forward
            self._reap()
            if packed.tensor is not None:
                self._check_version(packed)
                self.stats.from_memory += 1
                tensor = packed.tensor
                if (
                    packed.narrow is not None
                ):  # rounded as it would come back, so that results do not depend on the disk's speed
                    tensor = tensor.to(packed.narrow.dtype).to(tensor.dtype)
            else:
                tensor = self._bring_back(packed)
            self._prefetch(packed)
            return tensor

    def _bring_back(self, boundary: Boundary) -> Tensor:
        loading, boundary.loading = boundary.loading or self._load(boundary), None
        if loading.ready():
            self.stats.prefetch_hits += 1
        else:
            self.stats.prefetch_misses += 1
        raw, stalled = self._timed(loading.wait, boundary)
        if stalled > STALL_SECONDS and self.adaptive:
            self.depth = min(self.depth + 1, MAX_PREFETCH)
        if boundary.narrow is not None:
            return boundary.narrow.rebuild(raw).to(boundary.geometry.dtype)
        return boundary.geometry.rebuild(raw)

    def _prefetch(self, boundary: Boundary) -> None:
        """Begin to load those that were packed before, the nearest first; let go of others, which another graph was to
        use.
        """
        nearest: list[Boundary] = []
        wanted = boundary.previous()
        while wanted is not None and len(nearest) < self.depth:
            if wanted.tensor is None and wanted.stored is not None:
                nearest.append(wanted)
            wanted = wanted.previous()
        for ref in self._coming:
            if (other := ref()) is not None and other not in nearest:
                other.loading = None
        for near in nearest:
            near.loading = near.loading or self._load(near)
        self._coming = [weakref.ref(near) for near in nearest]

    def _load(self, boundary: Boundary) -> Loading:
        assert boundary.stored is not None
        try:
            return boundary.stored.load()
        except OffloadError as error:
            raise error.of(boundary.origin) from error.__cause__

    # Both

    def _timed(self, wait: Callable[[float], Waited], boundary: Boundary) -> tuple[Waited, float]:
        start = time.perf_counter()
        try:
            result = wait(self.wait_seconds)
        except OffloadError as error:
            raise error.of(boundary.origin) from error.__cause__
        finally:
            seconds = time.perf_counter() - start
            self.stats.stalled_ms += seconds * 1e3
        return result, seconds

    def _check_version(self, boundary: Boundary) -> None:
        tensor = boundary.tensor
        if tensor is not None and tensor._version != boundary.version:
            raise OffloadError(
                f"a tensor was changed in place after it was packed (version {boundary.version}, now {tensor._version}): what the"
                " backward needs is gone. Make the change out of place",
                origin=boundary.origin,
            )

    def _check_usable(self, origin: Origin | None = None) -> None:
        if self._closed:
            raise OffloadError(
                "the offloader was released before this graph's backward: release it after", origin=origin
            )
        if os.getpid() != self._process:
            raise OffloadError("this process is a fork of the one that offloads: train in the parent", origin=origin)

    def _tell_once(self, message: str) -> None:
        if not self._told:
            self._told = True
            warn(message)

    def so_far(self) -> OffloadStats:
        """The figures of all steps, the current one included."""
        with self._lock:
            total = OffloadStats()
            total.add(self.total)
            total.add(self.stats)
            return total

    def end_step(self) -> OffloadStats:
        """The figures since the last call, which are added to the total."""
        with self._lock:
            stats, self.stats = self.stats, OffloadStats()
            self.total.add(stats)
            return stats

    def free_buffers(self) -> None:
        """Give back RAM that nothing is in; the next boundary asks for it anew."""
        with self._lock:
            for tier in (self.disk, self.ram):
                if tier is not None:
                    tier.free_buffers()

    def close(self) -> None:
        """Stop all copies and give RAM and disk back. Graphs that are still alive cannot be run backward any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for boundary in list(self._live):
                boundary.tensor = boundary.loading = None
            for tier in (self.disk, self.ram):
                if tier is not None:
                    tier.close()


def _identity(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
