"""Live bytes over a step: what was allocated when, for how long, and for which part of the training; and FLOPs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

from lt_tiled.offload.tensors import storage_key

aten = torch.ops.aten

Work = Counter[str]
"""FLOPs: those of ``"attention"`` kernels, and of other ``"products"`` of matrices."""


@dataclass
class Allocation:
    """Bytes that are alive from one moment to another; moments count allocations and releases."""

    nbytes: int
    part: str
    """What they are for: ``"weights"``, ``"attention"``, ..."""
    born: int
    died: int | None = None


class Ledger(TorchDispatchMode):
    """Records the storages that operations allocate, real or fake, the bytes added by :meth:`hold`, and FLOPs.

    FLOPs are counted by torch's formulas. ``FlopCounterMode`` counts the same, but the hooks by which it follows
    modules keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.now = 0
        """Bytes."""
        self.clock = 0
        self.restart_peak()
        self.allocations: list[Allocation] = []
        self._live: dict[int | None, Allocation] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        # FSDP empties storages and fills them again, by no operation.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if (allocation := self._live.get(storage._cdata)) is not None:
                self._end(allocation)
                self._live[storage._cdata] = self._add(size, allocation.part)
            return self._resize(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        # Count what it computes.
        packet = func._overloadpacket
        formula: Any = _OWN.get(packet) or flop_registry.get(packet)
        if formula is not None:
            kind = "attention" if "attention" in str(packet) else "products"
            self.work[kind] += int(formula(*args, **kwargs, out_val=result))
        # What an operation was given, and returns or views, is older than the ledger. A search of all is slow.
        new = [tensor for tensor in _plain_tensors(result) if storage_key(tensor) not in self._live]
        if new:
            given = set(map(storage_key, _plain_tensors((args, kwargs))))
            for tensor in new:
                if storage_key(tensor) not in given:
                    self._track(tensor)
        if func.namespace == "lt_tiled":  # a collective of sequence parallelism
            self.name((args, result), "communication")
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    @property
    def flops(self) -> int:
        """The FLOPs so far."""
        return self.work.total()

    def part(self) -> str:
        """Return what is running."""
        return "rest"

    def _track(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        storage = tensor.untyped_storage()
        if key not in self._live and tensor.device.type != "meta":
            self._live[key] = self._add(storage.nbytes(), self.part())
            weakref.finalize(storage, self._forget, key).atexit = False

    def _add(self, nbytes: int, part: str) -> Allocation:
        self.clock += 1
        allocation = Allocation(nbytes, part, self.clock)
        self.allocations.append(allocation)
        self.now += nbytes
        if self.now > self.peak:
            self.restart_peak()
        return allocation

    def _forget(self, key: int | None) -> None:
        if (allocation := self._live.pop(key, None)) is not None:
            self._end(allocation)

    def _end(self, allocation: Allocation) -> None:
        if allocation.died is None:
            self.clock += 1
            allocation.died = self.clock
            self.now -= allocation.nbytes

    def hold(self, nbytes: int, part: str) -> Callable[[], None]:
        """Record bytes that no operation allocates, and return a function that releases them once."""
        return partial(self._end, self._add(nbytes, part))

    def name(self, tensors: Any, part: str) -> None:
        """Set the part of the storages of tensors."""
        for tensor in _plain_tensors(tensors):
            if (allocation := self._live.get(storage_key(tensor))) is not None:
                allocation.part = part

    def drop(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, because what it simulates is not on the device."""
        self._forget(storage_key(tensor))

    def restart_peak(self) -> None:
        """Start a new peak at the current bytes."""
        self.peak = self.now
        self.peak_at = self.clock


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that own memory: those inside of a wrapper such as a DTensor in its place."""
    if isinstance(tree, Tensor):
        known: Any = tree  # the narrowed type has no other members
        if is_traceable_wrapper_subclass(known):
            for name in known.__tensor_flatten__()[0]:
                yield from _plain_tensors(getattr(tree, name))
        elif tree.layout is torch.strided:  # sparse tensors have no storage
            yield tree
    elif isinstance(tree, dict):
        yield from _plain_tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):  # all that operations take and return; several times as fast as pytree
        for leaf in tree:
            yield from _plain_tensors(leaf)


def _attention(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    """Count two products ``[S, D] x [D, K]`` per head; kernels skip the upper half of a causal mask."""
    batch, heads, tokens, head_dim = query.shape
    return int(4 * batch * heads * tokens * key.shape[-2] * head_dim // (2 if is_causal else 1))


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, dropout_p: Any, is_causal: Any, **_: Any
) -> int:
    """Count five products, one of which recomputes the scores."""
    return _attention(query, key, value, dropout_p, is_causal) * 5 // 2


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Count each row of ``left`` times one matrix of ``right``."""
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


_OWN: dict[Any, Any] = {  # torch has no formula for the CPU's attention and for mixtures of experts
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
