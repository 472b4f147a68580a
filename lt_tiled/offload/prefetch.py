"""Offloaded tensors, and how they are loaded in the backward pass, ahead of their use."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lt_tiled.errors import OffloadError, Origin, name_origin
from lt_tiled.offload.geometry import Geometry
from lt_tiled.offload.stats import OffloadStats, StallClock
from lt_tiled.offload.tiers import Loading, Stored

MAX_PREFETCH = 8
"""The most tensors that ``prefetch="auto"`` loads ahead."""
MAX_BYTES = 4 * 2**30
"""The most bytes that ``prefetch="auto"`` loads ahead.

Estimated for Llama 3 8B: a block input of 4 GiB is one of 524,288 tokens. It loads in 0.09 s at 50 GB/s, and recompute
and backward pass of attention over one such sequence take about 20 s at 400 TFLOP/s. From a disk, or with many short
sequences, the wait is longer: give ``prefetch`` a number.
"""
STALL_MS = 1.0
"""A longer wait is a stall, after which ``prefetch="auto"`` loads one more tensor ahead."""
EVENTS_MS = 0.1
"""A shorter wait of a GPU is none: the two events that measure it take a few microseconds."""


class OffloadedTensor:
    """One saved tensor. Its space on a tier is freed when the graph that saved it is freed.

    Args:
        tensor: The tensor.
        origin: Names it in errors.
        previous: Returns the tensor that was saved before it, while that one is alive.
    """

    def __init__(self, tensor: Tensor, origin: Origin, previous: Callable[[], OffloadedTensor | None]) -> None:
        self.origin, self.previous, self.device = origin, previous, tensor.device
        self.storage = weakref.ref(tensor.untyped_storage())
        self.geometry = Geometry.of(tensor)
        """The geometry of the bytes that are stored: those of the tensor, or of what it was rounded to."""
        # Detached: the grad_fn of a saved output leads back to the node that saves this object.
        self.tensor: Tensor | None = tensor.detach()
        """The tensor itself, until its bytes are stored."""
        self.version = tensor._version
        self.stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self.computed = None if self.stream is None else self.stream.record_event()
        self.stored: Stored | None = None
        self.loading: Loading | None = None

    def in_memory(self) -> Tensor | None:
        """Return the tensor if it has not left yet, rounded as it would come back from its tier."""
        self.check_version()
        return None if self.tensor is None else self.tensor.to(self.geometry.dtype).to(self.origin.dtype)

    def load(self) -> Loading:
        """Begin to load the bytes."""
        assert self.stored is not None
        with name_origin(self.origin):
            return self.stored.load()

    def rebuild(self, raw: Tensor) -> Tensor:
        """Return the tensor that has these bytes."""
        return self.geometry.rebuild(raw).to(self.origin.dtype)

    def check_version(self) -> None:
        """Raise :class:`OffloadError` if the tensor was changed in place and its bytes are not stored yet."""
        if self.tensor is not None and (now := self.tensor._version) != self.version:
            raise OffloadError(
                f"a tensor was changed in place after it was saved (version {self.version}, now {now}), so its"
                " values for the backward pass are lost. Make the change out of place",
                origin=self.origin,
            )


class Prefetcher:
    """Loads tensors in the reverse order of saving.

    Args:
        depth: How many tensors to load ahead, or ``"auto"``: one, and one more after each stall, within
            :data:`MAX_BYTES`. Fewer from then on where the memory of the device ends.
    """

    def __init__(self, depth: int | Literal["auto"]) -> None:
        self.adaptive = depth == "auto"
        self.depth = 1 if depth == "auto" else depth
        self._loading: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()

    def load(self, wanted: OffloadedTensor, seconds: float, stats: OffloadStats, clock: StallClock) -> Tensor:
        """Return a tensor whose bytes are stored, within ``seconds``."""
        began_early, on_gpu = wanted.loading is not None, wanted.device.type == "cuda"
        loading, wanted.loading = wanted.loading or wanted.load(), None
        ready = loading.ready()

        def count(stats: OffloadStats, ms: float) -> None:
            hit = ready or (on_gpu and ms < EVENTS_MS)
            stats.prefetch_hits += hit
            stats.prefetch_misses += not hit
            stats.stalled_ms += ms
            if self.adaptive and began_early and ms > STALL_MS:
                self.depth = min(self.depth + 1, MAX_PREFETCH)

        with name_origin(wanted.origin), clock.waiting(wanted.device, stats, count):
            raw = loading.wait(seconds)
        return wanted.rebuild(raw)

    def load_ahead(self, used: OffloadedTensor) -> None:
        """Begin to load the tensors saved before ``used``, and drop loads that another graph began."""
        nearest: list[OffloadedTensor] = []
        wanted, room = used.previous(), float(MAX_BYTES) if self.adaptive else math.inf
        while wanted is not None and len(nearest) < self.depth:
            if wanted.tensor is None and wanted.stored is not None:
                room -= wanted.geometry.nbytes
                if room < 0:
                    break
                nearest.append(wanted)
            wanted = wanted.previous()
        for other in self._loading.difference(nearest):
            other.loading = None
        for index, near in enumerate(nearest):
            try:
                near.loading = near.loading or near.load()
            except torch.OutOfMemoryError:  # none of them is needed yet
                nearest, self.depth = nearest[:index], max(1, index)
                break
        self._loading = weakref.WeakSet(nearest)
