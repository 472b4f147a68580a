"""The exchange around what mixes tokens: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

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

Attention = Callable[..., Tensor]
"""Computes attention of some heads: from queries ``[B, h, S, D]``, keys and values ``[B, k, S, D]``, the heads' place
among all query heads, and parts of vectors, to ``[B, h, S, D]``."""


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


def attend(
    region: Region,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    vectors: Sequence[Tensor] = (),
) -> Tensor:
    """Compute the attention of a rank's tokens ``[B, H, S/n, D]`` to the tokens of all ranks.

    ``attention`` gets its heads' part of ``vectors``, which have an entry for each query head.

    Raises:
        ValueError: If the shapes are not those of self-attention in the region, or there are too few heads.
    """
    if not query.dim() == key.dim() == value.dim() == 4 or {t.shape[2] for t in (query, key, value)} != {region.length}:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise ValueError(
            f"{region.owner} was given queries, keys and values of the shapes {shapes}. Sequence parallelism needs"
            f" self-attention of all {region.length} tokens of the rank, [B, heads, {region.length}, D]: use another"
            " attention, or name modules without this one in SequenceParallel(targets=...)."
        )

    def compute(mine: Share, queries: Sequence[Tensor], keys: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        return attention(*queries, *keys, mine.queries, *own)

    return over_heads(region, [query], [key, value], vectors, compute, "query heads", region.record)


Compute = Callable[[Share, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Computes something of all tokens of some heads: from their share, two lists of tensors ``[B, h, S, ...]``, of query
heads and of key-value heads, and parts of vectors, to ``[B, h, S, D]``."""


def over_heads(
    region: Region,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    vectors: Sequence[Tensor],
    compute: Compute,
    what: str,
    record: list[Any] | None = None,
) -> Tensor:
    """Compute what mixes the tokens of each head ``[B, H, S, D]``, where each rank has its tokens of all heads.

    Args:
        region: Where the tokens are shared.
        queries: Tensors of all heads, ``[B, H, S/n, ...]``.
        keys: Tensors with an entry for several heads, ``[B, K, S/n, ...]``.
        vectors: Tensors with an entry for each head, ``[H, ...]``, and no tokens.
        compute: Gets all tokens of the rank's heads.
        what: The name of the heads in messages.
        record: Collects what ``compute`` gets, with the share that it belongs to.

    Raises:
        ValueError: If there are fewer heads than ranks.
    """
    region.check_recompute()
    heads = queries[0].shape[1]
    if heads < region.size:
        raise ValueError(
            f"{region.owner} has {heads} {what}, which {region.size} ranks cannot share: use"
            f" sequence_parallel={heads} or less."
        )
    region.exchanges += 1
    shares = shares_of(heads, keys[0].shape[1] if keys else heads, region.size)
    mine = shares[region.rank]
    of_ranks = [[share.queries for share in shares]] * len(queries) + [[share.keys for share in shares]] * len(keys)

    def run(*inputs: Tensor) -> Tensor:
        exchanged = _exchanged(region, of_ranks, inputs[: len(of_ranks)], to_heads=True)
        own_queries, own_keys = exchanged[: len(queries)], exchanged[len(queries) :]
        if record is not None:
            record.append((mine, *own_queries, *own_keys))
        if mine.uneven:
            index = torch.tensor(mine.key_of, device=own_queries[0].device)
            own_keys = [key.index_select(1, index) for key in own_keys]
        with entered(None):  # attention may call another one that is exchanged, which has all tokens already
            out = compute(mine, own_queries, own_keys, [vector[mine.queries] for vector in inputs[len(of_ranks) :]])
        return _exchanged(region, of_ranks[:1], [out], to_heads=False)[0]

    return attended(run, *queries, *keys, *vectors)


Heads = list[list[slice]]
"""For each tensor of an exchange, the heads of each rank. Ranks may share key-value heads."""


def _exchanged(region: Region, heads: Heads, tensors: Sequence[Tensor], to_heads: bool) -> list[Tensor]:
    """Return all tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, H, S/n, D]``.

    With ``to_heads=False`` it is the other way round, and heads that several ranks have are summed. Each direction is
    the adjoint of the other.
    """
    found = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors) if region.size > 1 else ():  # one all-to-all sends one dtype
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        outputs = _Exchange.apply(region, [heads[i] for i in places], to_heads, *(tensors[i] for i in places))
        for place, output in zip(places, outputs, strict=True):
            found[place] = output
    return found


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
