"""Loading of offloaded tensors in the backward pass, ahead of their use."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from lt_tiled.errors import Origin, name_origin
from lt_tiled.offload.offloaded_tensor import OffloadedTensor
from lt_tiled.offload.stats import OffloadStats

MAX_PREFETCH = 8
"""The most tensors that ``prefetch="auto"`` loads ahead."""
STALL_MS = 1.0
"""A longer wait is a stall, after which ``prefetch="auto"`` loads one more tensor ahead."""


class Prefetcher:
    """Loads tensors in the reverse order of packing.

    Args:
        depth: How many tensors to load ahead, or ``"auto"``: one, and one more after each stall.
    """

    def __init__(self, depth: int | Literal["auto"]) -> None:
        self.adaptive = depth == "auto"
        self.depth = 1 if depth == "auto" else depth
        self._loading: list[weakref.ref[OffloadedTensor]] = []

    def load(self, wanted: OffloadedTensor, seconds: float, stats: OffloadStats) -> Tensor:
        """Return a tensor whose bytes are stored, within ``seconds``."""
        loading, wanted.loading = wanted.loading or wanted.load(), None
        if loading.ready():
            stats.prefetch_hits += 1
        else:
            stats.prefetch_misses += 1
        before = stats.stalled_ms
        with waiting_for(wanted.origin, stats):
            raw = loading.wait(seconds)
        if self.adaptive and stats.stalled_ms - before > STALL_MS:
            self.depth = min(self.depth + 1, MAX_PREFETCH)
        return wanted.rebuild(raw)

    def load_ahead(self, used: OffloadedTensor) -> None:
        """Begin to load the tensors packed before ``used``, and drop loads that another graph began."""
        nearest: list[OffloadedTensor] = []
        wanted = used.previous()
        while wanted is not None and len(nearest) < self.depth:
            if wanted.tensor is None and wanted.stored is not None:
                nearest.append(wanted)
            wanted = wanted.previous()
        for ref in self._loading:
            if (other := ref()) is not None and other not in nearest:
                other.loading = None
        for near in nearest:
            near.loading = near.loading or near.load()
        self._loading = [weakref.ref(near) for near in nearest]


@contextmanager
def waiting_for(origin: Origin, stats: OffloadStats) -> Iterator[None]:
    """Count the time spent inside as stalled, and name the tensor in errors."""
    start = time.perf_counter()
    try:
        with name_origin(origin):
            yield
    finally:
        stats.stalled_ms += (time.perf_counter() - start) * 1e3
