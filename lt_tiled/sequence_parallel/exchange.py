"""The exchange around attention: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of heads that is not below the size of the group, any number of key-value heads and any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_tiled.sequence_parallel.collectives import all_to_all
from lt_tiled.sequence_parallel.kept import attended, kept_or
from lt_tiled.sequence_parallel.region import Region, entered

Attention = Callable[[Tensor, Tensor, Tensor, slice], Tensor]
"""Computes attention of some heads: from queries ``[B, h, S, D]``, keys and values ``[B, k, S, D]`` and the heads'
place among all query heads to ``[B, h, S, D]``."""


@dataclass(frozen=True)
class Share:
    """The heads of one rank: its query heads, and the key-value heads that they attend to."""

    queries: slice
    keys: slice
    key_of: tuple[int, ...]
    """For each query head the place of its key-value head in ``keys``."""

    @property
    def uneven(self) -> bool:
        """Whether the key-value heads have different numbers of query heads here, which attention does not support."""
        heads, keys = len(self.key_of), self.keys.stop - self.keys.start
        return heads % keys != 0 or self.key_of != tuple(head * keys // heads for head in range(heads))


def shares_of(queries: int, keys: int, size: int) -> list[Share]:
    """Return what each of ``size`` ranks attends with, of ``queries`` heads on ``keys`` key-value heads."""
    shares: list[Share] = []
    for rank in range(size):
        low = shares[-1].queries.stop if shares else 0
        high = low + queries // size + (rank < queries % size)
        first, last = low * keys // queries, (high - 1) * keys // queries
        key_of = tuple(head * keys // queries - first for head in range(low, high))
        shares.append(Share(slice(low, high), slice(first, last + 1), key_of))
    return shares


def attend(region: Region, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    """Compute the attention of a rank's tokens ``[B, H, S/n, D]`` to the tokens of all ranks.

    Raises:
        ValueError: If the shapes are not those of self-attention in the region, or there are too few heads.
    """
    region.check_recompute()
    if not query.dim() == key.dim() == value.dim() == 4 or {t.shape[2] for t in (query, key, value)} != {region.length}:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise ValueError(
            f"{region.owner} was given queries, keys and values of the shapes {shapes}. Sequence parallelism needs"
            f" self-attention of all {region.length} tokens of the rank, [B, heads, {region.length}, D]: use another"
            " attention, or name modules without this one in SequenceParallel(targets=...)."
        )
    heads = query.shape[1]
    if heads < region.size:
        raise ValueError(
            f"{region.owner} has {heads} query heads, which {region.size} ranks cannot share: use"
            f" sequence_parallel={heads} or less."
        )
    region.exchanges += 1
    return attended(partial(_attend, region, attention), query, key, value)


def _attend(region: Region, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Exchange, attend, exchange back."""
    shares = shares_of(query.shape[1], key.shape[1], region.size)
    mine = shares[region.rank]
    queries, keys = [share.queries for share in shares], [share.keys for share in shares]
    if query.dtype == key.dtype == value.dtype:
        q, k, v = _exchanged(region, [queries, keys, keys], [query, key, value], to_heads=True)
    else:  # one all-to-all sends one dtype
        (q,) = _exchanged(region, [queries], [query], to_heads=True)
        (k,) = _exchanged(region, [keys], [key], to_heads=True)
        (v,) = _exchanged(region, [keys], [value], to_heads=True)
    if region.record is not None:
        region.record.append((mine, q, k, v))
    if mine.uneven:
        index = torch.tensor(mine.key_of, device=key.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    with entered(None):  # attention may call another one that is exchanged, which has all tokens already
        out = attention(q, k, v, mine.queries)
    return _exchanged(region, [queries], [out], to_heads=False)[0]


Heads = list[list[slice]]
"""For each tensor of an exchange, the heads of each rank. Ranks may share key-value heads."""


def _exchanged(region: Region, heads: Heads, tensors: list[Tensor], to_heads: bool) -> Sequence[Tensor]:
    """Return all tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, H, S/n, D]``.

    With ``to_heads=False`` it is the other way round, and heads that several ranks have are summed. Each direction is
    the adjoint of the other.
    """
    return tensors if region.size == 1 else _Exchange.apply(region, heads, to_heads, *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, heads: Heads, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = region, heads, not to_heads
        # In a backward pass nothing is kept.
        arrived = kept_or("exchange", partial(_sent, region, heads, to_heads, tensors))
        outputs, begin = [], 0
        for tensor, of_ranks in zip(tensors, heads, strict=True):
            mine, (batch, _, _, width) = of_ranks[region.rank], tensor.shape
            count, tokens = (mine.stop - mine.start, region.total) if to_heads else (of_ranks[-1].stop, region.length)
            outputs.append(tensor.new_zeros(batch, count, tokens, width))
        for part in _parts(region, heads, outputs, by_heads=not to_heads):
            its = arrived[begin : begin + part.numel()].view(part.shape)
            begin += part.numel()
            part.copy_(its) if to_heads else part.add_(its)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_Exchange.apply(*ctx.exchange, *gradients)


def _parts(region: Region, heads: Heads, tensors: Sequence[Tensor], by_heads: bool) -> Iterator[Tensor]:
    """Yield the part of each tensor for each rank: the rank's heads, or its tokens."""
    for rank, (begin, length) in enumerate(zip(region.begins, region.lengths, strict=True)):
        for tensor, of_ranks in zip(tensors, heads, strict=True):
            yield tensor[:, of_ranks[rank]] if by_heads else tensor.narrow(2, begin, length)


def _sent(region: Region, heads: Heads, to_heads: bool, tensors: Sequence[Tensor]) -> Tensor:
    """Send each rank its parts of these tensors, and return the parts that arrive, as one flat tensor."""
    by_heads, by_tokens = [0] * region.size, [0] * region.size  # the numbers in the parts of each rank
    for tensor, of_ranks in zip(tensors, heads, strict=True):
        each = tensor.shape[0] * tensor.shape[3]
        mine = of_ranks[region.rank]
        for rank, (its, length) in enumerate(zip(of_ranks, region.lengths, strict=True)):
            by_heads[rank] += each * (its.stop - its.start) * region.length
            by_tokens[rank] += each * (mine.stop - mine.start) * length
    send, receive = (by_heads, by_tokens) if to_heads else (by_tokens, by_heads)
    packed, begin = tensors[0].new_empty(sum(send)), 0
    for part in _parts(region, heads, tensors, by_heads=to_heads):
        # torch.cat would need each part in its order first: two copies
        packed[begin : begin + part.numel()].view(part.shape).copy_(part)
        begin += part.numel()
    arrived: Tensor = all_to_all(packed, send, receive, region.name)
    return arrived
