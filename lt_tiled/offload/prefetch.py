"""Offloaded tensors, and how they are loaded in the backward pass, ahead of their use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lt_tiled.errors import OffloadError, Origin, name_origin
from lt_tiled.offload.geometry import Geometry, raw_bytes
from lt_tiled.offload.tiers import Loading, Stored, Tier

MAX_BYTES_AHEAD = 4 * 2**30
"""The most bytes that are loaded ahead.

Estimated for Llama 3 8B: a block input of 4 GiB is one of 524,288 tokens. It loads in 0.09 s at 50 GB/s, and recompute
and backward pass of attention over one such sequence take about 20 s at 400 TFLOP/s.
"""


class OffloadedTensor:
    """One saved tensor. Its space on a tier is freed when the graph that saved it is freed.

    ``origin`` names it in errors. ``previous`` returns the tensor that was saved before it, while that one is alive.
    """

    def __init__(self, tensor: Tensor, origin: Origin, previous: Callable[[], OffloadedTensor | None]) -> None:
        self.origin, self.previous, self.device = origin, previous, tensor.device
        self.geometry = Geometry.of(tensor)
        # Detached: the grad_fn of a saved output leads back to the node that saves this object.
        self.tensor: Tensor | None = tensor.detach()
        """The tensor itself, until its bytes are stored."""
        self.version = tensor._version
        self.stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self.stored: Stored | None = None
        self.loading: Loading | None = None

    def store(self, tiers: Sequence[Tier]) -> Stored | None:
        """Begin to store it on the first tier that has room."""
        assert self.tensor is not None
        with name_origin(self.origin), self._on_its_stream():
            for tier in tiers:
                if (stored := tier.store(raw_bytes(self.tensor))) is not None:
                    self.stored = stored
                    break
        return self.stored

    @contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """Make the stream on which the tensor was saved the current one: what reads it there comes after it."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def check_unchanged(self) -> None:
        """Raise :class:`OffloadError` if the tensor was changed in place, while its bytes were not stored yet."""
        if self.tensor is not None and (now := self.tensor._version) != self.version:
            raise OffloadError(
                f"a tensor was changed in place after it was saved (version {self.version}, now {now}), so its"
                " values for the backward pass are lost. Make the change out of place",
                origin=self.origin,
            )

    def begin_loading(self) -> Loading:
        """Begin to load the bytes unless that began earlier, and return the load."""
        if self.loading is None:
            assert self.stored is not None
            with name_origin(self.origin):
                self.loading = self.stored.tier.load(self.stored.room, self.geometry.nbytes, self.device)
        return self.loading


class Prefetcher:
    """Loads tensors in the reverse order of saving: ``depth`` of them ahead, up to :data:`MAX_BYTES_AHEAD`.

    After an out-of-memory error the depth drops to the number of loads that began.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._loading: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()

    def load_ahead(self, used: OffloadedTensor) -> None:
        """Begin to load the tensors saved before ``used``, and drop loads that another graph began."""
        nearest: list[OffloadedTensor] = []
        wanted, room = used.previous(), MAX_BYTES_AHEAD
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
                near.begin_loading()
            except torch.OutOfMemoryError:  # none of them is needed yet
                nearest, self.depth = nearest[:index], max(1, index)
                break
        self._loading = weakref.WeakSet(nearest)
