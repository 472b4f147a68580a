"""The exchange around what mixes tokens: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of query heads that is not below the number of ranks, and any number of key-value heads, which several ranks may need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lt_tiled.modules.patch import without_compiler
from lt_tiled.recompute.keep import attending
from lt_tiled.recompute.mode import in_checkpoint, is_backward
from lt_tiled.sequence_parallel.agreement import check_same_block
from lt_tiled.sequence_parallel.collectives import all_to_all
from lt_tiled.sequence_parallel.groups import check_heads
from lt_tiled.sequence_parallel.ulysses import UlyssesState, entered, pack_hook

# The block around an exchange

_block: ContextVar[tuple[str, Any]] = ContextVar("block", default=("", None))
"""The name of the block that runs, and the innermost hook on saved tensors where it began."""


@contextmanager
def in_block(name: str) -> Iterator[None]:
    """Name the block in which tokens are exchanged."""
    token = _block.set((name, pack_hook()))
    try:
        yield
    finally:
        _block.reset(token)


def begin_exchange(state: UlyssesState, function: str, tensor: Tensor) -> None:
    """Note that a function sees all tokens, and compare with the other ranks in which block that is.

    Raises:
        ValueError: If a checkpoint inside of the block would recompute it, or the ranks are in different blocks.
    """
    name, hook = _block.get()
    if in_checkpoint() and pack_hook() is not hook:
        raise own_checkpointing(state.owner, "inside of its blocks, around attention")
    if not is_backward():  # a recompute repeats what the ranks agreed on
        check_same_block(state.owner, state.group, f"{function} in {name}", tensor)
    state.calls.append(function)


def own_checkpointing(owner: str, where: str) -> ValueError:
    """Return the error for activation checkpointing whose recompute would be outside of the shared pass."""
    return ValueError(
        f"{owner} uses activation checkpointing {where}. With sequence parallelism its recompute would see the tokens"
        " of one rank. Use lt_tiled's activation checkpointing (activation_checkpointing=True) in place of"
        " gradient_checkpointing_enable() or torch's checkpoint."
    )


# Which rank computes which heads


@dataclass(frozen=True)
class HeadShard:
    """The heads that one rank computes."""

    heads: slice
    """The place of its query heads among all of them."""
    keys: slice
    """The place of the key-value heads that these attend to."""
    key_of: tuple[int, ...]
    """For each query head the place of its key-value head in ``keys``."""

    def matched(self, keys: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the key-value heads ``[B, k, S, ...]`` as attention takes them.

        Where they have different numbers of query heads here, there is one for each query head.
        """
        heads, count = len(self.key_of), self.keys.stop - self.keys.start
        if heads % count == 0 and self.key_of == tuple(head * count // heads for head in range(heads)):
            return list(keys)
        return [key.index_select(1, torch.tensor(self.key_of, device=key.device)) for key in keys]


def head_shards(queries: int, keys: int, size: int) -> list[HeadShard]:
    """Return what each of ``size`` ranks computes, of ``queries`` heads on ``keys`` key-value heads."""
    shards: list[HeadShard] = []
    high = 0
    for rank in range(size):
        low, high = high, high + queries // size + (rank < queries % size)
        first, last = low * keys // queries, (high - 1) * keys // queries
        key_of = tuple(head * keys // queries - first for head in range(low, high))
        shards.append(HeadShard(slice(low, high), slice(first, last + 1), key_of))
    return shards


# The exchange

Compute = Callable[[HeadShard, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Computes something of some heads: from their shard, two lists of tensors ``[B, h, S, ...]``, of query heads and of
key-value heads, and parts of vectors, to ``[B, h, S, D]``."""


def over_heads(
    state: UlyssesState,
    function: str,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    vectors: Sequence[Tensor],
    compute: Compute,
) -> Tensor:
    """Compute what mixes the tokens of each head ``[B, H, S, D]``, where each rank has its tokens of all heads.

    Args:
        state: The state of the shared pass.
        function: The name of what computes.
        queries: Tensors of all heads, ``[B, H, S/n, ...]``.
        keys: Tensors with an entry for several heads, ``[B, K, S/n, ...]``.
        vectors: Tensors with an entry for each head, ``[H, ...]``, and no tokens.
        compute: Gets all tokens of the rank's heads.
    """
    begin_exchange(state, function, queries[0])
    heads = queries[0].shape[1]
    check_heads(state.owner, state.size, heads)
    shards = head_shards(heads, keys[0].shape[1], state.size)
    mine = shards[state.rank]
    of_queries, of_keys = [shard.heads for shard in shards], [shard.keys for shard in shards]
    of_ranks = [of_queries] * len(queries) + [of_keys] * len(keys)

    with attending():
        # 1. All tokens of the rank's heads, without those that repeat the last one.
        arrived = exchanged(state, of_ranks, [*queries, *keys], to_heads=True)
        arrived = [tensor.narrow(2, 0, state.total) for tensor in arrived]
        # 2. Outside of the shared pass: attention may call another one that is exchanged, which has all tokens already.
        with entered(None):
            parts = [vector[mine.heads] for vector in vectors]
            out = compute(mine, arrived[: len(queries)], mine.matched(arrived[len(queries) :]), parts)
        # 3. All heads of the rank's tokens.
        return exchanged(state, [of_queries], [state.padded(out, 2)], to_heads=False)[0]


def exchanged(
    state: UlyssesState, heads: Sequence[Sequence[slice]], tensors: Sequence[Tensor], to_heads: bool
) -> list[Tensor]:
    """Return the tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, H, S/n, D]``.

    ``heads`` are those of each rank, for each tensor. With ``to_heads=False`` it is the other way round, and what
    several ranks have is summed. Each direction is the adjoint of the other.
    """
    found = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # one all-to-all sends one dtype
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        outputs = _Exchange.apply(state, [heads[i] for i in places], to_heads, *(tensors[i] for i in places))
        for place, output in zip(places, outputs, strict=True):
            found[place] = output
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, state: UlyssesState, heads: Sequence[Sequence[slice]], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = state, heads, not to_heads
        # 1. Each rank gets the part of its heads, or of its tokens, of each tensor.
        send = _parts(state, heads, tensors, by_heads=to_heads)
        outputs = []
        for tensor, of_ranks in zip(tensors, heads, strict=True):
            count, tokens = of_ranks[-1].stop, state.length
            if to_heads:
                count, tokens = of_ranks[state.rank].stop - of_ranks[state.rank].start, state.size * state.length
            outputs.append(tensor.new_zeros(tensor.shape[0], count, tokens, tensor.shape[3]))
        places = _parts(state, heads, outputs, by_heads=not to_heads)
        arrived = _sent(state, send, [_numel(part) for part in places])
        # 2. What arrives has its place by the rank that sent it.
        begin = 0
        for view in chain.from_iterable(places):
            its = arrived[begin : begin + view.numel()].view(view.shape)
            begin += view.numel()
            if to_heads:
                view.copy_(its)
            else:
                view.add_(its)
        return tuple(outputs)

    @staticmethod
    @without_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_Exchange.apply(*ctx.exchange, *gradients)


def _parts(
    state: UlyssesState, heads: Sequence[Sequence[slice]], tensors: Sequence[Tensor], by_heads: bool
) -> list[list[Tensor]]:
    """Return for each rank the parts of the tensors that belong to its heads, or to its tokens."""
    parts = []
    for rank in range(state.size):
        if by_heads:
            parts.append([tensor[:, of_ranks[rank]] for tensor, of_ranks in zip(tensors, heads, strict=True)])
        else:
            parts.append([tensor.narrow(2, rank * state.length, state.length) for tensor in tensors])
    return parts


def _numel(part: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in part)


def _sent(state: UlyssesState, parts: Sequence[Sequence[Tensor]], receive: list[int]) -> Tensor:
    """Send each rank its parts, and return what arrives, as one flat tensor."""
    send = [_numel(part) for part in parts]
    packed, begin = parts[0][0].new_empty(sum(send)), 0
    for view in chain.from_iterable(parts):
        # torch.cat would need each part in its order first: two copies
        packed[begin : begin + view.numel()].view(view.shape).copy_(view)
        begin += view.numel()
    arrived: Tensor = all_to_all(packed, send, receive, state.name)
    return arrived
