"""Which calls of blocks are recomputed under ``recompute="auto"``, and which keep attention under ``keep="auto"``.

NOTE [What is not recomputed]
The first call of a block is recomputed, which measures how many bytes the block would save without a recompute. A later
call whose arguments are no larger is not recomputed if all blocks together save at most a quarter of the bytes of the
weights on a rank, or 256 MiB where that is more. Bytes that other calls still save for their backward pass count toward
the limit. A larger call is recomputed, and measured in its turn.

Each rank decides for itself, so ranks whose lengths differ may recompute different calls. That changes neither the
order of gradients nor the collectives of an engine, but a recompute that communicates would wait for other ranks
forever. So a block is always recomputed if it may communicate: if an engine has hooks inside it, if the first call of a
kind runs a collective, or if its code names ``torch.distributed``, which finds code that communicates in later calls.
Code is followed from the ``forward`` of each module through the methods and functions that it names. Functions in
attributes, tables and compiled extensions are not followed: they are found only if they communicate in the first call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lt_tiled._log import inform
from lt_tiled.allowance import Allowance, Room
from lt_tiled.communicates import Collectives, has_engine_inside, names_collectives
from lt_tiled.kept import Kept, Watch, apart
from lt_tiled.memory import gib, ranks
from lt_tiled.modules.patch import uncompiled
from lt_tiled.sequence_parallel.region import current
from lt_tiled.tiling.weights import weight_bytes

LEAST = 2**28
"""Bytes that the blocks of any model may save."""


def allowed(model: nn.Module, ranks: int = 1) -> Allowance:
    """Return the bytes that the blocks of a model may save in place of a recompute, if so many ranks shard it."""
    return Allowance(max(LEAST, weight_bytes(model) // ranks // 4))


class Auto:
    """What the calls of a block showed so far.

    Args:
        blocks: The number of blocks of the model.
        allowance: The bytes that they may save in place of a recompute.
        room: The bytes that they may keep of attention, with ``keep="auto"``.
    """

    def __init__(self, blocks: int, allowance: Allowance, room: Room | None = None) -> None:
        self.blocks, self.allowance, self.room = blocks, allowance, room
        self.largest = 0
        """The tokens of the largest call that was not recomputed."""
        self.kept = (0, 0)
        """The tokens of the largest call that kept attention's output, and the bytes that it kept."""
        self.communicates: bool | None = None
        """Whether a recompute may communicate; ``None`` before the first call."""
        self.measured: dict[Hashable, list[Row]] = {}
        """The largest calls, by what else is known of calls."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return a call, unless it is always recomputed and keeps nothing."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(t.is_nested for t in tensors):  # their sizes are not integers
            return None
        hidden = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
        if hidden is None:
            return None
        if self.room is None and (self.communicates or not self.may_save(_nbytes(hidden))):
            return None
        parts = [*module.modules()]
        trained = len([p for part in parts for p in part._parameters.values() if p is not None and p.requires_grad])
        hooks = sum([len(part._forward_pre_hooks) + len(part._forward_hooks) for part in parts])
        of_tensors = [(t.dtype, t.requires_grad, t.dim()) for t in tensors]
        key = (module.training, trained, len(parts), hooks, ranks(), *of_tensors)
        sizes = [size for t in tensors for size in t.shape]
        if (region := current()) is not None:  # what attention is given besides the block's arguments
            masked = region.mask.numel() if isinstance(region.mask, Tensor) else 0
            sizes += [len(region.documents or ()), masked]
        return Call(self, key, sizes, hidden)

    def may_save(self, nbytes: float) -> bool:
        """Whether all blocks together may save so many bytes each."""
        return nbytes * self.blocks <= self.allowance.limit

    @property
    def saves_little(self) -> bool:
        """Whether no call like those so far is recomputed again."""
        rows = [row for rows in self.measured.values() for row in rows]
        return bool(rows) and all(self.may_save(row.saved) for row in rows) and self.communicates is False


@dataclass
class Row:
    """A call that was measured: the largest one of its kind, or the largest one that need not be recomputed."""

    sizes: list[int]
    tokens: int
    saved: int
    """The bytes that it would save without a recompute."""
    attends: bool
    """Whether there is attention in it whose output can be kept."""
    kept: int | None = None
    """The bytes of that output with what else attention saves, once it was kept."""


class Call:
    """A call of a block.

    Args:
        auto: What the block's calls showed so far.
        key: What is known of the call besides its size.
        sizes: Its size.
        hidden: The block's hidden states.
    """

    def __init__(self, auto: Auto, key: Hashable, sizes: list[int], hidden: Tensor) -> None:
        self.auto, self.key, self.sizes = auto, key, sizes
        self.tokens, self.nbytes, self.device = hidden.shape[:-1].numel(), _nbytes(hidden), hidden.device
        self._counted: SavedBytes | None = None
        larger = [row for row in auto.measured.get(key, ()) if all(map(int.__le__, sizes, row.sizes))]
        row = self.row = min(larger, key=lambda row: row.saved, default=None)
        """A call at least as large that was measured."""
        self.measures = row is None or (
            not auto.communicates
            and self.tokens < row.tokens
            and not auto.may_save(row.saved)
            and auto.may_save(row.saved * (self.tokens / row.tokens) ** 2)  # scores of attention
        )
        """Whether it is to be measured: if none is as large, or if it may be short enough not to be recomputed."""
        first = key not in auto.measured
        self.watch = Collectives() if first and not auto.communicates and ranks() > 1 else None
        """Notes in the first call of its kind whether it communicates. That and its recompute run uncompiled."""

    @property
    def saves(self) -> int | None:
        """The bytes that it saves at most without a recompute, if it needs none."""
        auto = self.auto
        if self.row is None or auto.communicates or not auto.may_save(self.row.saved):
            return None
        return self.row.saved if auto.allowance.fits(self.row.saved) else None

    def hold(self, nbytes: int, output: Any) -> None:
        """Count the bytes that it saves without a recompute until its backward pass."""
        self.auto.largest = max(self.auto.largest, self.tokens)
        self.auto.allowance.hold(nbytes, output)

    def keeps(self, module: nn.Module, arguments: list[Tensor]) -> Kept | None:
        """Return what it keeps for its recompute under ``keep="auto"``, or what looks for attention in it."""
        room, row = self.auto.room, self.row
        if room is None:
            return None
        may_keep = room.begin(self.device, self.nbytes, larger=row is None)
        if row is None or self.measures:
            return Watch(self.device, Collectives() if ranks() > 1 else None)
        if not may_keep or not row.attends:
            return None
        if not room.fits(row.saved if row.kept is None else row.kept):
            inform(
                f"keep='auto' has {gib(room.limit)} on {self.device} for what blocks keep of attention, which is not"
                f" enough for all of them on {self.tokens} tokens: the others recompute attention.",
                once="no room to keep",
            )
            return None
        if row.kept is None:
            self._counted = SavedBytes(module, arguments)
        return Kept("attention_output", self.device, self._pack, locally=True)

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._counted is not None:
            self._counted.add(tensor)
        return apart(tensor)

    def end(self, kept: Kept | None, output: Any) -> None:
        """Count what it was given, and what it keeps, until its backward pass, once its forward pass has ended."""
        auto, row = self.auto, self.row
        if auto.room is None:
            return
        auto.room.waiting.hold(self.nbytes, output)
        if kept is None or isinstance(kept, Watch) or row is None:
            return
        if self._counted is not None:
            row.kept, row.attends, self._counted = self._counted.total, kept.attends, None
        if row.attends and row.kept is not None:
            auto.room.hold(row.kept, output)
            auto.kept = max(auto.kept, (self.tokens, row.kept))

    @contextmanager
    def measured(self, module: nn.Module, sizes: SavedBytes, kept: Kept | None) -> Iterator[None]:
        """Learn from a recomputed call what it would save, whether it communicates, and whether it has attention."""
        auto, watch = self.auto, self.watch
        with nullcontext() if watch is None else uncompiled(watch):
            yield
        names = ranks() > 1 and names_collectives(module)
        found = watch is not None and (watch.seen or names or has_engine_inside(module))
        auto.communicates = auto.communicates or found
        rows = auto.measured.setdefault(self.key, [])
        new = Row(self.sizes, self.tokens, sizes.total, kept is not None and kept.attends and not names)
        useful = auto.may_save(new.saved)
        rows[:] = [
            row
            for row in rows
            if not all(map(int.__le__, row.sizes, new.sizes)) or (auto.may_save(row.saved) and not useful)
        ]
        rows.append(new)


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
            known = isinstance(storage, StorageWeakRef)
            self.total += tensor.untyped_storage().nbytes() if known else _nbytes(tensor)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # sparse tensors have no nbytes


def _storage(tensor: Tensor) -> StorageWeakRef | object:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError, ValueError):  # sparse tensors, subclasses without one, lazy weights
        return object()
