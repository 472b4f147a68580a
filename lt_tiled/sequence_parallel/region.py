"""The region in which each rank of a group has its own tokens of a sequence.

NOTE [Sequence parallelism]
Outside of a region all ranks of a group hold the same values: whole inputs go in; the loss of the whole sequence, or
hidden states of all tokens, come out. Inside of it each rank has a run of consecutive tokens. What the model computes
is the mean over the ranks of the loss that each returns. The gradient of that mean is the mean of the ranks' gradients,
which every engine computes over all ranks anyway. So no engine is told anything, provided that the backward pass of
each collective is its exact adjoint:

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
loss of the router. Where a model computes anything else before its first block, the region begins at that block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled.recompute.mode import carried, in_checkpoint
from lt_tiled.sequence_parallel.collectives import all_gather, group_mean, name_of


@dataclass(eq=False)
class Region:
    """How the tokens of one forward pass are shared. The first ranks have one token more if the length is no multiple.

    Args:
        group: The ranks that share the sequence; ``None`` for this rank alone.
        total: The sequence length.
        owner: The class and path of the model, for messages.
        in_blocks: Whether the region begins with the first of a chain of blocks, whose inputs are whole outside, and
            not with the tokens of a model.
    """

    group: dist.ProcessGroup | None
    total: int
    owner: str
    in_blocks: bool = False
    mode: AbstractContextManager[Any] | None = None
    """The torch function mode that finds attention in models that call torch's function themselves."""
    position_ids: Tensor | None = None
    """Of all tokens."""
    own_position_ids: Tensor | None = None
    """Of the rank's own tokens, where a model is given these."""
    documents: list[int] | None = None
    """The lengths of packed documents that attend only to themselves."""
    mask: Any = None
    """The mask of all tokens, where all layers have the same one."""
    made_mask: Any = None
    """What the decoder of a causal model is given, if that gets the rank's own token ids: masks of all tokens by the
    kinds of layers, or one that stands for ``mask``."""
    losses: int = 0
    """How many losses were computed from the labels of all ranks, which may leave the region as scalars."""
    record: list[Any] | None = None
    """Collects the inputs of attention with the heads that they belong to, if it is a list."""
    exchanges: int = 0
    """How often attention, or another function that mixes tokens, saw all tokens."""
    mixed: set[str] = field(default_factory=set)
    """The functions that the current layer called, of those that mix tokens by a state or a convolution."""
    seq_idx: Tensor | None = None
    """The documents that all tokens belong to, as kernels of state layers take them: ``[B, S]``."""
    closed: bool = False
    """Whether the last block of a chain returned all tokens."""
    name: str = field(init=False, default="")
    """The name of the group, which the operators in ``collectives.py`` take."""
    size: int = field(init=False, default=1)
    rank: int = field(init=False, default=0)
    lengths: list[int] = field(init=False)
    """The number of tokens of each rank."""
    begins: list[int] = field(init=False)
    """The place of each rank's first token."""
    _begun: tuple[Any, bool] = field(init=False, default=(None, True))
    """The saved-tensor hooks and the grad mode with which the current block began."""

    def __post_init__(self) -> None:
        if self.group is not None:
            self.name, self.size, self.rank = name_of(self.group), self.group.size(), self.group.rank()
        each, more = divmod(self.total, self.size)
        self.lengths = [each + (rank < more) for rank in range(self.size)]
        self.begins = [rank * each + min(rank, more) for rank in range(self.size)]

    @property
    def length(self) -> int:
        return self.lengths[self.rank]

    def local(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the rank's own tokens: ``[B, S, ...]`` becomes ``[B, length, ...]``."""
        return x.narrow(dim, self.begins[self.rank], self.length)

    def gathered(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all tokens: ``[B, length, ...]`` becomes ``[B, S, ...]``."""
        return self.kept_by(x if self.size == 1 else all_gather(x, self.lengths, dim % x.dim(), self.name))

    def all_positions(self, own: Tensor) -> Tensor:
        """Return the position ids of all tokens, for those of the rank's own that a module was given."""
        if own is self.own_position_ids and self.position_ids is not None:
            return self.position_ids
        everything: Tensor = all_gather(own, self.lengths, own.dim() - 1, self.name)
        return everything

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the group of a loss that each rank computed from its own labels."""
        return self.kept_by(x if self.size == 1 else group_mean(x, self.name))

    def shifted(self, labels: Tensor, ignore_index: int) -> Tensor:
        """Return the label of the token after each of the rank's, ``[..., length]``, and none for the last of all."""
        whole = all_gather(labels[..., :1].contiguous(), [1] * self.size, labels.dim() - 1, self.name)
        after = torch.nn.functional.pad(whole, (0, 1), value=ignore_index)[..., self.rank + 1, None]
        return torch.cat([labels[..., 1:], after], -1)

    def kept_by(self, x: Tensor) -> Tensor:
        """Keep the region for as long as the graph of this tensor, which may recompute parts of it.

        Where its gradient arrives, the region has to be closed.
        """
        if x.requires_grad:
            x.register_hook(self.check_closed)
        return x

    def check_exchanged(self) -> None:
        """Raise ``ValueError`` if no attention saw the tokens of all ranks."""
        if not self.exchanges:
            raise ValueError(
                f"{self.owner} shared its sequences, and no attention saw all tokens. Use the sdpa, flash or flex"
                " attention of transformers (attn_implementation), or F.scaled_dot_product_attention."
            )

    def check_closed(self, _: Tensor | None = None) -> None:
        """Raise ``RuntimeError`` if the hidden states behind the blocks were never gathered."""
        if self.in_blocks and not self.closed:
            raise RuntimeError(
                f"{self.owner}: the first of the blocks was called, and the last of the blocks was not called after it,"
                " so what is behind them has the tokens of one rank: call the blocks in their order and up to the last"
                " one, or name one module around them in SequenceParallel(targets=...)."
            )

    @contextmanager
    def in_block(self) -> Iterator[None]:
        """Run a block, or its recompute: find attention in it, and what checkpoints inside of it."""
        before, self._begun = self._begun, _saving()
        try:
            with nullcontext() if self.mode is None else self.mode:
                yield
        finally:
            self._begun = before

    def check_recompute(self) -> None:
        """Raise ``RuntimeError`` if a checkpoint inside of a block would recompute attention outside of the region."""
        (hooks, grad), (now, on) = self._begun, _saving()
        inside = now is not hooks and in_checkpoint()
        if inside or on != grad:
            raise RuntimeError(
                f"{self.owner} uses activation checkpointing inside of its blocks, around attention. With sequence"
                " parallelism its recompute would see the tokens of one rank. Use lt_tiled's activation checkpointing"
                " (activation_checkpointing=True) in place of gradient_checkpointing_enable(), or checkpoint whole"
                " blocks."
            )


_current: ContextVar[Region | None] = ContextVar("region", default=None)
carried.append(_current)


def current() -> Region | None:
    """Return the region in which this thread computes."""
    return _current.get()


def _saving() -> tuple[Any, bool]:
    """Return the innermost hook on saved tensors, and whether gradients are on."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # no public name
    return (None if hooks is None else hooks[0]), torch.is_grad_enabled()


@contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Compute in a region, or with ``None`` outside of any."""
    token = _current.set(region)
    try:
        yield
    finally:
        _current.reset(token)


def gathered(x: Tensor, dim: int = 1) -> Tensor:
    """Return the tokens of all ranks of a tensor that is computed in a region, and outside of one the tensor itself."""
    region = current()
    return x if region is None else region.gathered(x, dim)
