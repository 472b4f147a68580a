"""Exact measures on a CPU: FLOPs, and the peak of live bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def flops(run: Callable[[], Any]) -> int:
    """Floating point operations of the matrix products that ``run`` executes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while it is entered, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta" and leaf.untyped_storage()._cdata not in before:
                self._track(leaf.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes alive at once of the tensors that ``run`` makes."""
    with LiveBytes() as meter:
        run()
    return meter.peak
