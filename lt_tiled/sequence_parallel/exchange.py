"""The exchange around what mixes tokens: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of query heads that is not below the number of ranks, any number of key-value heads, which several ranks may need, and
any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lt_tiled.modules.patch import without_compiler
from lt_tiled.recompute.keep import attending
from lt_tiled.sequence_parallel.collectives import all_to_all
from lt_tiled.sequence_parallel.groups import check_heads
from lt_tiled.sequence_parallel.region import Region, entered


@dataclass(frozen=True)
class Share:
    """The heads that one rank attends with."""

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


def shares_of(queries: int, keys: int, size: int) -> list[Share]:
    """Return what each of ``size`` ranks attends with, of ``queries`` heads on ``keys`` key-value heads."""
    shares: list[Share] = []
    high = 0
    for rank in range(size):
        low, high = high, high + queries // size + (rank < queries % size)
        first, last = low * keys // queries, (high - 1) * keys // queries
        key_of = tuple(head * keys // queries - first for head in range(low, high))
        shares.append(Share(slice(low, high), slice(first, last + 1), key_of))
    return shares


Attention = Callable[..., Tensor]
"""Computes attention of some heads: from queries ``[B, h, S, D]``, keys and values ``[B, k, S, D]``, the share of the
rank, and parts of vectors, to ``[B, h, S, D]``."""


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
    """
    if not query.dim() == key.dim() == value.dim() == 4 or {t.shape[2] for t in (query, key, value)} != {region.length}:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise ValueError(
            f"{region.owner} was given queries, keys and values of the shapes {shapes}. Sequence parallelism needs"
            f" self-attention of all {region.length} tokens of the rank, [B, heads, {region.length}, D]: use another"
            " attention, or name modules without this one in SequenceParallel(targets=...)."
        )

    def compute(mine: Share, queries: Sequence[Tensor], keys: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        return attention(*queries, *keys, mine, *own)

    return over_heads(region, [query], [key, value], vectors, compute, region.record)


Compute = Callable[[Share, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Computes something of some heads: from their share, two lists of tensors ``[B, h, S, ...]``, of query heads and of
key-value heads, and parts of vectors, to ``[B, h, S, D]``."""


def over_heads(
    region: Region,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    vectors: Sequence[Tensor],
    compute: Compute,
    record: list[Any] | None = None,
) -> Tensor:
    """Compute what mixes the tokens of each head ``[B, H, S, D]``, where each rank has its tokens of all heads.

    Args:
        region: The region.
        queries: Tensors of all heads, ``[B, H, S/n, ...]``.
        keys: Tensors with an entry for several heads, ``[B, K, S/n, ...]``.
        vectors: Tensors with an entry for each head, ``[H, ...]``, and no tokens.
        compute: Gets all tokens of the rank's heads.
        record: Collects what ``compute`` gets, with the share that it belongs to.
    """
    region.check_recompute()
    region.exchanges += 1
    heads = queries[0].shape[1]
    check_heads(region.owner, region.size, heads)
    shares = shares_of(heads, keys[0].shape[1], region.size)
    mine, first, last = shares[region.rank], len(queries), len(queries) + len(keys)
    of_ranks = [[share.heads for share in shares]] * len(queries) + [[share.keys for share in shares]] * len(keys)

    with attending():
        arrived = exchanged(region, of_ranks, [*queries, *keys], to_heads=True)
        own_queries, own_keys = arrived[:first], arrived[first:last]
        if record is not None:
            record.append((mine, *own_queries, *own_keys))
        with entered(None):  # attention may call another one that is exchanged, which has all tokens already
            parts = [vector[mine.heads] for vector in vectors]
            out = compute(mine, own_queries, mine.matched(own_keys), parts)
        return exchanged(region, of_ranks[:1], [out], to_heads=False)[0]


def exchanged(
    region: Region, heads: Sequence[Sequence[slice]], tensors: Sequence[Tensor], to_heads: bool
) -> list[Tensor]:
    """Return the tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, H, S/n, D]``.

    ``heads`` are those of each rank, for each tensor. With ``to_heads=False`` it is the other way round, and what
    several ranks have is summed. Each direction is the adjoint of the other.
    """
    if region.size == 1:
        return list(tensors)
    found = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # one all-to-all sends one dtype
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        outputs = _Exchange.apply(region, [heads[i] for i in places], to_heads, *(tensors[i] for i in places))
        for place, output in zip(places, outputs, strict=True):
            found[place] = output
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, heads: Sequence[Sequence[slice]], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = region, heads, not to_heads
        outputs = []
        for tensor, of_ranks in zip(tensors, heads, strict=True):
            count, tokens = of_ranks[-1].stop, region.length
            if to_heads:
                count, tokens = of_ranks[region.rank].stop - of_ranks[region.rank].start, region.total
            outputs.append(tensor.new_zeros(tensor.shape[0], count, tokens, tensor.shape[3]))
        places = _parts(region, heads, outputs, by_heads=not to_heads)
        send = _parts(region, heads, tensors, by_heads=to_heads)
        arrived = _arrived(region, send, [_numel(part) for part in places])
        begin = 0
        for view in chain.from_iterable(places):
            its = arrived[begin : begin + view.numel()].view(view.shape)
            begin += view.numel()
            view.copy_(its) if to_heads else view.add_(its)
        return tuple(outputs)

    @staticmethod
    @without_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_Exchange.apply(*ctx.exchange, *gradients)


def _parts(
    region: Region, heads: Sequence[Sequence[slice]], tensors: Sequence[Tensor], by_heads: bool
) -> list[list[Tensor]]:
    """Return for each rank the parts of the tensors that belong to its heads, or to its tokens."""
    parts = []
    for rank in range(region.size):
        if by_heads:
            parts.append([tensor[:, of_ranks[rank]] for tensor, of_ranks in zip(tensors, heads, strict=True)])
        else:
            parts.append([tensor.narrow(2, region.begins[rank], region.lengths[rank]) for tensor in tensors])
    return parts


def _numel(part: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in part)


def _arrived(region: Region, parts: Sequence[Sequence[Tensor]], receive: list[int]) -> Tensor:
    """Send each rank its parts, and return what arrives, as one flat tensor."""
    send = [_numel(part) for part in parts]
    packed, begin = parts[0][0].new_empty(sum(send)), 0
    for view in chain.from_iterable(parts):
        # torch.cat would need each part in its order first: two copies
        packed[begin : begin + view.numel()].view(view.shape).copy_(view)
        begin += view.numel()
    arrived: Tensor = all_to_all(packed, send, receive, region.name)
    return arrived
