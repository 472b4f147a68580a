"""Which calls of blocks are recomputed under ``recompute="auto"``.

NOTE [What is not recomputed]
The first call of a block is recomputed, which measures how many bytes the block would save without a recompute. A later
call whose arguments are no larger is not recomputed if all blocks together save at most a quarter of the bytes of the
weights on a rank, or 256 MiB where that is more. Bytes that other calls still save for their backward pass count toward
the limit. A larger call is recomputed, and measured in its turn.

Each rank decides for itself, so ranks whose lengths differ may recompute different calls. That changes neither the
order of gradients nor the collectives of an engine, but a recompute that communicates would wait for other ranks
forever. So a block is always recomputed if an engine has hooks inside it, or if its first call runs a collective.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lt_tiled.modules.patch import is_of
from lt_tiled.tiling.weights import weight_bytes

LEAST = 2**28
"""Bytes that the blocks of any model may save."""
_ENGINES = ("torch.distributed.", "deepspeed.")


class Allowance:
    """The bytes that the blocks of a model may save in place of a recompute.

    Args:
        model: The model.
        blocks: The number of its blocks.
        ranks: The number of ranks that shard its weights.
    """

    def __init__(self, model: nn.Module, blocks: int, ranks: int = 1) -> None:
        self.blocks, self.limit, self.used = blocks, max(LEAST, weight_bytes(model) // ranks // 4), 0


class Auto:
    """What the recomputed calls of a block showed."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.largest = 0
        """The tokens of the largest call that was not recomputed."""
        self.communicates: bool | None = None
        """Whether a recompute may communicate; ``None`` before the first call."""
        self.measured: dict[Hashable, list[tuple[list[int], int]]] = {}
        """The sizes of the largest calls and the bytes they would save, by what else is known of calls."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return a call, if its inputs alone are not too large."""
        if torch.compiler.is_compiling():
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(t.is_nested for t in tensors):  # their sizes are not integers
            return None
        hidden = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
        if self.communicates or hidden is None or hidden.nbytes * self.allowance.blocks > self.allowance.limit:
            return None
        trained = sum(p.requires_grad for p in module.parameters())
        key = (module.training, trained, *[(t.dtype, t.requires_grad, t.dim()) for t in tensors])
        return Call(self, key, [size for t in tensors for size in t.shape], hidden.shape[:-1].numel())

    @property
    def saves_little(self) -> bool:
        """Whether no call like those so far is recomputed again."""
        sizes = [nbytes for rows in self.measured.values() for _, nbytes in rows]
        fits = bool(sizes) and max(sizes) * self.allowance.blocks <= self.allowance.limit
        return fits and self.communicates is False


@dataclass(frozen=True)
class Call:
    """A call of a block."""

    auto: Auto
    key: Hashable
    """What is known of it besides its size."""
    sizes: list[int]
    tokens: int

    @property
    def saves(self) -> int | None:
        """The bytes that it saves at most without a recompute, if it needs none."""
        allowance = self.auto.allowance
        for sizes, nbytes in self.auto.measured.get(self.key, ()):
            fits = nbytes * allowance.blocks <= allowance.limit and allowance.used + nbytes <= allowance.limit
            if fits and all(map(int.__le__, self.sizes, sizes)):
                return nbytes
        return None

    def hold(self, nbytes: int, output: Any) -> None:
        """Count the bytes that it saves until its backward pass."""
        self.auto.largest = max(self.auto.largest, self.tokens)
        nodes = (leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        if (node := next((node for node in nodes if node is not None), None)) is not None:
            node.register_prehook(_Held(self.auto.allowance, nbytes))

    @contextmanager
    def measured(self, module: nn.Module, sizes: SavedBytes) -> Iterator[None]:
        """Learn from a recomputed call what it would save, and whether it communicates."""
        auto = self.auto
        watch = Collectives() if ranks() > 1 and auto.communicates is None else None
        with ExitStack() as stack:
            if watch is not None:
                stack.enter_context(watch)
            yield
        if auto.communicates is None:
            auto.communicates = watch is not None and (watch.seen or has_engine_inside(module))
        rows = auto.measured.setdefault(self.key, [])
        rows[:] = [row for row in rows if not all(map(int.__le__, row[0], self.sizes))]
        rows.append((self.sizes, sizes.total))


class _Held:
    """Bytes that are in use until the backward pass, or until a graph that has none is freed."""

    def __init__(self, allowance: Allowance, nbytes: int) -> None:
        self.allowance, self.nbytes = allowance, nbytes
        allowance.used += nbytes

    def __call__(self, _: Any = None) -> None:
        """Give the bytes back, and leave the gradients as they are."""
        self.allowance.used -= self.nbytes
        self.nbytes = 0

    __del__ = __call__


def ranks() -> int:
    """Return the number of ranks, without ``torch.distributed`` one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SavedBytes:
    """Counts the bytes of the tensors that a block saves, except those of its weights, buffers and arguments."""

    def __init__(self, module: nn.Module, arguments: list[Tensor]) -> None:
        self.total = 0
        # Weak references, without which a storage that is freed and one after it could have the same address.
        self._known = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers(), *arguments)}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor, unless its memory is known."""
        storage = _storage(tensor)
        if storage not in self._known:
            self._known.add(storage)
            self.total += tensor.untyped_storage().nbytes() if isinstance(storage, StorageWeakRef) else tensor.nbytes


# The compiler cannot make weak references of storages, and says so when it frees them.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _storage(tensor: Tensor) -> StorageWeakRef | object:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse tensors and subclasses without a storage
        return object()


class Collectives(TorchDispatchMode):
    """Notes whether a collective runs inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        self.seen = self.seen or "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def has_engine_inside(block: nn.Module) -> bool:
    """Whether an engine has hooks in a block, as for FSDP units in it and modules whose weights ZeRO-3 gathers."""
    inside = [module for module in block.modules() if module is not block]
    parts = [part for module in inside for part in (type(module), *module._forward_pre_hooks.values())]
    return any(is_of(part, _ENGINES) for part in parts)
