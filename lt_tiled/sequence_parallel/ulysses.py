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

Every rank has equally many tokens: the last ones repeat the last token of the sequence where the length is no multiple.
These are left out of attention, of the loss and of what is all-gathered, so their gradients are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lt_tiled.policies import SequenceParallel
from lt_tiled.recompute.mode import carried, version_of
from lt_tiled.sequence_parallel.groups import all_gather, check_same_block, name_of


@dataclass(frozen=True, eq=False)
class UlyssesState:
    """How the tokens of one forward pass are shared. Its recompute gets the same object."""

    group: dist.ProcessGroup
    """The ranks that share the sequence."""
    total: int
    """The sequence length."""
    owner: str
    """The class and path of the model, for messages."""
    to_loss: bool = False
    """Whether it is that of a causal model from its token ids to its loss, and not of blocks alone."""
    positions: Any = None
    """The position ids of all tokens, ``[B, S]`` or ``[1, S]``, where they are known."""
    documents: tuple[int, ...] = ()
    """The lengths of packed documents that attend only to themselves."""
    exchanges: list[str] = field(default_factory=list)
    """The functions that saw all tokens so far."""
    copies: Any = field(default_factory=WeakTensorKeyDictionary)
    """The rank's own tokens of tensors that several blocks are given, such as rotary tables."""

    @property
    def length(self) -> int:
        """The number of tokens of each rank, with those that repeat the last one."""
        return -(-self.total // self.group.size())

    @property
    def begin(self) -> int:
        """The place of the rank's first token."""
        return self.group.rank() * self.length

    @property
    def count(self) -> int:
        """The number of the rank's tokens that belong to the sequence."""
        return max(0, min(self.length, self.total - self.begin))

    def end(self) -> None:
        """Agree with the other ranks that the last of the blocks ran, and that tokens were exchanged in some."""
        if not self.exchanges:
            raise ValueError(
                f"{self.owner} shared its sequences, and no attention saw all tokens: use attention of transformers, or"
                " F.scaled_dot_product_attention, in its blocks."
            )
        check_same_block(self.group, f"{self.owner}: the end of the blocks")

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return a copy of the rank's own tokens, one for all blocks: ``[B, S, ...]`` becomes ``[B, length, ...]``."""
        copies: dict[Any, Tensor] = self.copies.setdefault(x, {})
        key = (dim, version_of(x), torch.is_grad_enabled())
        if key not in copies or x.is_inference():  # nothing counts its changes in place
            copies[key] = self.part(x, dim, self.begin, self.length).clone()  # a view would keep all tokens alive
        return copies[key]

    def part(self, x: Tensor, dim: int, begin: int, count: int) -> Tensor:
        """Return some tokens, of which those behind the sequence repeat the last one."""
        if begin + count <= self.total:
            return x.narrow(dim, begin, count)
        places = torch.arange(begin, begin + count, device=x.device)
        return x.index_select(dim, places.clamp(max=self.total - 1))

    def gathered(self, x: Tensor) -> Tensor:
        """Return all tokens: ``[B, length, ...]`` becomes ``[B, S, ...]``."""
        everything: Tensor = all_gather(x, name_of(self.group))  # [n, B, length, ...]
        return everything.movedim(0, 1).flatten(1, 2).narrow(1, 0, self.total)


@dataclass(frozen=True, eq=False)
class Door:
    """How a part of a model shares its sequences: what is known before it runs."""

    owner: str
    """The name of the model in messages."""
    policy: SequenceParallel
    group: Any
    """The ranks that share each sequence; in a simulation, a stand-in for them."""
    caller: nn.Module | None
    """The module that calls the blocks; ``None`` if the policy names the module."""
    blocks: Sequence[tuple[str, nn.Module]]
    """The modules with their paths: a pass is shared from the first one to the last."""
    finds_attention: bool = True
    """Whether the model calls ``F.scaled_dot_product_attention`` itself."""
    hand_written: bool = True
    """Whether the model is not one of transformers."""
    lengths: Sequence[int] = ()
    """Numbers of tokens above which the model may compute otherwise."""
    checked: dict[bool, int] = field(default_factory=dict)
    """For each training mode, how many of these lengths a checked sequence exceeded."""

    def state(self, total: int, **known: Any) -> UlyssesState:
        """Return the state of a forward pass on so many tokens."""
        return UlyssesState(self.group, total, self.owner, **known)


shared_pass: ContextVar[UlyssesState | None] = ContextVar("shared_pass", default=None)
"""The state of the shared forward pass that this thread computes."""
carried.append(shared_pass)


@contextmanager
def held(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable for a while."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def gathered(x: Tensor) -> Tensor:
    """Return all tokens of a tensor that is computed in a shared pass, and outside of one the tensor itself."""
    state = shared_pass.get()
    return x if state is None else state.gathered(x)
