"""Live bytes over a step: what is allocated and released, in order, and for which part of the training; and FLOPs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lt_tiled.offload.tensors import storage_key

aten = torch.ops.aten

Work = Counter[str]
"""FLOPs: those of ``"attention"`` kernels, and of other ``"products"`` of matrices."""


@dataclass
class Allocation:
    """Bytes of one storage, or of a buffer that no operation allocates."""

    nbytes: int
    part: str  # what they are for


class Ledger(TorchDispatchMode):
    """Records the storages that operations allocate, real or fake, what :meth:`allocate` adds, and FLOPs.

    FLOPs are counted by torch's formulas. ``FlopCounterMode`` counts the same, but the hooks by which it follows
    modules keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.now = 0  # bytes
        self.events: list[tuple[Allocation, int]] = []
        """Allocations (1) and releases (-1) in order. A moment is a number of events."""
        self.restart_peak()
        self._storages: dict[int | None, Allocation] = {}
        self._resize = torch.UntypedStorage.resize_
        self._replaced: list[Any] = []

    def __enter__(self) -> Any:
        # FSDP empties storages and fills them again, by no operation.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if (allocation := self._storages.get(storage._cdata)) is not None:
                self.release(allocation)
                self._storages[storage._cdata] = self.allocate(size, allocation.part)
            return self._resize(storage, size)

        # Tiles enter the ledger once more: see ``hidden_from_checkpoints``.
        self._replaced.append(torch.UntypedStorage.resize_)
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._replaced.pop()  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        # 1. Count what the operation computes.
        packet = func._overloadpacket
        formula: Any = _OWN.get(packet) or flop_registry.get(packet)
        if formula is not None:
            kind = "attention" if "attention" in str(packet) else "products"
            self.work[kind] += int(formula(*args, **kwargs, out_val=result))
        # 2. Record the storages that it made. What it was given, and returns or views, is older than the ledger.
        made = [tensor for tensor in _plain_tensors(result) if storage_key(tensor) not in self._storages]
        given = {storage_key(tensor) for tensor in _plain_tensors(made and (args, kwargs))}
        for tensor in made:
            key = storage_key(tensor)
            if key not in self._storages and key not in given and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[key] = self.allocate(storage.nbytes(), self.part())
                weakref.finalize(storage, self.forget, key).atexit = False
        if func.namespace == "lt_tiled":  # a collective of sequence parallelism
            self.name((args, result), "communication")
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def part(self) -> str:
        return "rest"

    def allocate(self, nbytes: int, part: str) -> Allocation:
        """Record bytes until they are released."""
        allocation = Allocation(nbytes, part)
        self.events.append((allocation, 1))
        self.now += nbytes
        if self.now > self.peak:
            self.restart_peak()
        return allocation

    def release(self, allocation: Allocation) -> None:
        """Record that bytes are released."""
        self.events.append((allocation, -1))
        self.now -= allocation.nbytes

    def forget(self, key: int | None) -> None:
        """Stop counting a storage, if it is counted."""
        if (allocation := self._storages.pop(key, None)) is not None:
            self.release(allocation)

    def name(self, tensors: Any, part: str) -> None:
        """Set the part of the storages of tensors."""
        for tensor in _plain_tensors(tensors):
            if (allocation := self._storages.get(storage_key(tensor))) is not None:
                allocation.part = part

    def restart_peak(self) -> None:
        """Start a new peak at the current bytes."""
        self.peak = self.now
        self.peak_at = len(self.events)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that own memory: those inside of a wrapper such as a DTensor in its place."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            for name in leaf.__tensor_flatten__()[0]:
                yield from _plain_tensors(getattr(leaf, name))
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:  # sparse tensors have no storage
            yield leaf


def _attention(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    """Count two products ``[S, D] x [D, K]`` per head; kernels skip the upper half of a causal mask."""
    batch, heads, tokens, head_dim = query.shape
    return int(4 * batch * heads * tokens * key.shape[-2] * head_dim // (1 + is_causal))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *rest: Any, **_: Any) -> int:
    """Count five products, one of which recomputes the scores."""
    return _attention(query, key, value, *rest) * 5 // 2


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Count each row of ``left`` times one matrix of ``right``."""
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


_OWN: dict[Any, Any] = {  # torch has no formula for the CPU's attention and for mixtures of experts
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
