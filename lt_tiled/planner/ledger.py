"""Live bytes over a step: what was allocated when, for how long, and for which part of the training; and FLOPs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

from lt_tiled.offload.tensors import storage_key

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
"""Autograd asks each fake tensor for its device, which is most of what is dispatched: the ledger leaves it out."""


@dataclass
class Allocation:
    """Bytes that are alive from one moment to another; moments count allocations and releases."""

    nbytes: int
    part: str
    """What they are for: ``"weights"``, ``"attention"``, ..."""
    born: int
    died: int | None = None


@dataclass(frozen=True)
class Work:
    """What operations compute and exchange."""

    products: int = 0
    """FLOPs of matrix products."""
    attention: int = 0
    """FLOPs of attention kernels."""
    exchanged: int = 0
    """Bytes of tensors that ranks with a shared sequence exchange, the part that stays on the rank among them."""

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.attention + other.attention, self.exchanged + other.exchanged)

    def __sub__(self, other: Work) -> Work:
        return self + Work(-other.products, -other.attention, -other.exchanged)

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.products + self.attention


class Ledger(TorchDispatchMode):
    """Records the storages that operations allocate, real or fake, the bytes added by :meth:`hold`, and FLOPs.

    FLOPs are counted by torch's formulas. ``FlopCounterMode`` counts the same, but the hooks by which it follows
    modules keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        """Bytes."""
        self.work = Work()
        self.clock = self.peak_at = 0
        self.allocations: list[Allocation] = []
        self._live: dict[int | None, Allocation] = {}
        self._sum: Any = (None, None, None)
        """The peak before autograd added two gradients, the first of them, and the sum. Without a dispatch mode it
        adds in place where nothing else refers to the first one, which is then released next."""
        self._undo = ExitStack()

    def __enter__(self) -> Any:
        # FSDP empties storages and fills them again, by no operation.
        resize = torch.UntypedStorage.resize_

        def book(storage: torch.UntypedStorage, size: int) -> Any:
            if (allocation := self._live.get(storage._cdata)) is not None:
                self._end(allocation)
                self._live[storage._cdata] = self._add(size, allocation.part)
            return resize(storage, size)

        self._undo.callback(setattr, torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = book  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs, before = kwargs or {}, (self.peak, self.peak_at)
        moves = func.overloadpacket is aten.set_  # which alone gives an argument another storage
        given = _keys((args, kwargs)) if moves else None
        result = self.run(func, args, kwargs)
        self.work += work_of(func, args, kwargs, result)
        new = [tensor for tensor in _plain_tensors(result) if storage_key(tensor) not in self._live]
        if new and given is None:  # views and outputs in place are not new, and a search of all arguments is slow
            given = _keys((args, kwargs))
        for tensor in new:
            if storage_key(tensor) not in (given or ()):
                self._track(tensor)
        if func is aten.add.Tensor and new and _called_by_autograd():
            self._sum = before, self.find(args[0]), self.find(result)
        if func.namespace == "lt_tiled":  # a collective of sequence parallelism
            self.name((args, result), "communication")
        return result

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no work of what runs inside."""
        before = self.work
        yield
        self.work = before

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    @property
    def flops(self) -> int:
        """The FLOPs so far."""
        return self.work.flops

    def part(self) -> str:
        """Return what is running."""
        return "rest"

    def _track(self, tensor: Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key not in self._live and tensor.device.type != "meta":
            self._live[key] = self._add(storage.nbytes(), self.part())
            weakref.finalize(storage, self._forget, key).atexit = False

    def _add(self, nbytes: int, part: str) -> Allocation:
        self.clock += 1
        allocation = Allocation(nbytes, part, self.clock)
        self.allocations.append(allocation)
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, self.clock
        return allocation

    def _forget(self, key: int | None) -> None:
        if (allocation := self._live.pop(key, None)) is not None:
            self._end(allocation)

    def _end(self, allocation: Allocation) -> None:
        if allocation.died is None:
            (peak, first, total), self._sum = self._sum, (None, None, None)
            in_place = first is allocation and total is not None and total.born == self.clock
            self.clock += 1
            allocation.died = self.clock
            self.now -= allocation.nbytes
            if in_place:
                total.born, (self.peak, self.peak_at) = self.clock, peak

    def hold(self, nbytes: int, part: str) -> Callable[[], None]:
        """Record bytes that no operation allocates, and return a function that releases them once."""
        return partial(self._end, self._add(nbytes, part))

    def find(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation of a tensor's storage."""
        return self._live.get(storage_key(tensor))

    def name(self, tensors: Any, part: str) -> None:
        """Set the part of the storages of tensors."""
        for tensor in _plain_tensors(tensors):
            if (allocation := self.find(tensor)) is not None:
                allocation.part = part

    def drop(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, because what it simulates is not on the device."""
        self._forget(storage_key(tensor))

    def restart_peak(self) -> None:
        """Start a new peak at the current bytes."""
        self.peak, self.peak_at = self.now, self.clock


def _keys(tree: Any) -> set[int | None]:
    return {storage_key(tensor) for tensor in _plain_tensors(tree)}


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that own memory: those inside of a wrapper such as a DTensor in its place."""
    if isinstance(tree, Tensor):
        known: Any = tree  # the narrowed type has no other members
        if is_traceable_wrapper_subclass(known):
            yield from _plain_tensors([getattr(tree, name) for name in known.__tensor_flatten__()[0]])
        elif tree.layout is torch.strided:  # sparse tensors have no storage
            yield tree
    elif isinstance(tree, list | tuple | dict):  # all that operations take and return; several times as fast as pytree
        for leaf in tree.values() if isinstance(tree, dict) else tree:
            yield from _plain_tensors(leaf)


def _called_by_autograd() -> bool:
    """Whether an operation is one of autograd's own, and not of Python code that it runs."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "torch/_" not in path and frame.f_code.co_filename != __file__:  # around any dispatch mode, and this one
            break
        frame = frame.f_back
    return frame is None or frame.f_code is _engine_run_backward.__code__


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Return the work of an operation."""
    if func.namespace == "lt_tiled":  # the larger one of an all-gather or a reduce-scatter
        return Work(exchanged=max(sum(t.nbytes for t in _plain_tensors(tree)) for tree in (args, result)))
    packet = func._overloadpacket
    formula: Any = _OWN.get(packet) or flop_registry.get(packet)
    if formula is None:
        return Work()
    flops = int(formula(*args, **kwargs, out_val=result))
    return Work(attention=flops) if "attention" in str(packet) else Work(products=flops)


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
