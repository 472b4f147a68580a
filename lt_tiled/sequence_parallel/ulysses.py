"""The state of a forward pass whose sequence the ranks of a group share.

NOTE [Sequence parallelism]
Outside of a shared pass all ranks of a group hold the same values: whole inputs go in; the loss of the whole sequence,
or hidden states of all tokens, come out. Inside of it each rank has a run of consecutive tokens. What the model
computes is the mean over the ranks of the loss that each returns. The gradient of that mean is the mean of the ranks'
gradients, which every engine computes over all ranks anyway. So no engine is told anything, provided that the backward
pass of each collective is its exact adjoint:

==================================================  ===================================================
forward pass                                        backward pass
==================================================  ===================================================
cut out the rank's own tokens                       the own part of the gradient
all-gather                                          reduce-scatter, summed
all-to-all                                          the reverse all-to-all
mean over the group, of losses computed from the    identity
rank's labels and the mean of the group's counts
==================================================  ===================================================

Each rank holds its own tokens of embeddings, hidden states and logits. What is small and may depend on all tokens is
computed from all of them on each rank: masks, positions, rotary tables (of which a rank keeps its own rows) and the
loss of the router. Where a model computes anything else before its first block, it is shared from that block on.

Every rank has equally many tokens: the last ones repeat the last token of the sequence where the length is no multiple.
These are left out of attention, of the loss and of what is all-gathered, so their gradients are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled.recompute.mode import carried, saved_tensors_hooks
from lt_tiled.sequence_parallel.collectives import all_gather, name_of


def pack_hook() -> Any:
    """Return the innermost hook that sees the saved tensors of a graph that is made now; ``None`` without."""
    hooks = saved_tensors_hooks()
    return None if hooks is None else hooks[0]


@dataclass(frozen=True, eq=False)
class UlyssesState:
    """How the tokens of one forward pass are shared. Its recompute gets the same object."""

    group: dist.ProcessGroup
    """The ranks that share the sequence."""
    total: int
    """The sequence length."""
    owner: str
    """The class and path of the model, for messages."""
    positions: Tensor | None = None
    """The position ids of all tokens, ``[B, S]`` or ``[1, S]``, where they are known."""
    documents: tuple[int, ...] = ()
    """The lengths of packed documents that attend only to themselves."""
    mask: Any = None
    """The mask of all tokens, where all layers have the same one."""
    decoder_mask: Any = None
    """What the decoder of a causal model is given in place of a mask, if the pass is shared up to the loss: masks of
    all tokens by the kinds of layers, or one that stands for ``mask``."""
    hooks: Any = field(default_factory=pack_hook)
    """The innermost hook on saved tensors around the pass."""
    calls: list[str] = field(default_factory=list)
    """The functions that saw all tokens so far, in their order."""

    @property
    def name(self) -> str:
        """The name of the group, which the operators in ``collectives.py`` take."""
        return name_of(self.group)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def length(self) -> int:
        """The number of tokens of each rank, with those that repeat the last one."""
        return -(-self.total // self.size)

    @property
    def begin(self) -> int:
        """The place of the rank's first token."""
        return self.rank * self.length

    @property
    def count(self) -> int:
        """The number of the rank's tokens that belong to the sequence."""
        return max(0, min(self.length, self.total - self.begin))

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the rank's own tokens: ``[B, S, ...]`` becomes ``[B, length, ...]``."""
        return self._rows(x, dim, self.begin, self.length)

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """Return all tokens with those that make equally many for each rank."""
        return self._rows(x, dim, 0, self.size * self.length)

    def _rows(self, x: Tensor, dim: int, begin: int, count: int) -> Tensor:
        if begin + count <= self.total:
            return x.narrow(dim, begin, count)
        places = torch.arange(begin, begin + count, device=x.device)
        return x.index_select(dim, places.clamp(max=self.total - 1))

    def gathered(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all tokens: ``[B, length, ...]`` becomes ``[B, S, ...]``."""
        dim %= x.dim()
        everything: Tensor = all_gather(x, self.name)
        return everything.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, self.total)

    @cached_property
    def own_positions(self) -> Tensor | None:
        """The position ids of the rank's own tokens, where a model is given these."""
        return None if self.positions is None else self.own(self.positions, -1)

    def all_positions(self, own: Tensor) -> Tensor:
        """Return the position ids of all tokens, for those of the rank's own that a module was given."""
        if self.positions is not None and own is self.own_positions:
            return self.positions
        return self.gathered(own, -1)


_current: ContextVar[UlyssesState | None] = ContextVar("ulysses", default=None)
carried.append(_current)


def current() -> UlyssesState | None:
    """Return the state of the shared forward pass that this thread computes."""
    return _current.get()


def set_current(state: UlyssesState | None) -> None:
    """Begin a shared forward pass, or end it with ``None``."""
    _current.set(state)


@contextmanager
def entered(state: UlyssesState | None) -> Iterator[None]:
    """Compute in a shared forward pass, or with ``None`` outside of any."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


def gathered(x: Tensor, dim: int = 1) -> Tensor:
    """Return all tokens of a tensor that is computed in a shared pass, and outside of one the tensor itself."""
    state = current()
    return x if state is None else state.gathered(x, dim)
