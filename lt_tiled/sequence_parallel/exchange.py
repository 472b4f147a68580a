"""The exchange around what mixes tokens: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of heads and key-value heads and any lengths. With fewer query heads than ranks, several ranks have the same heads: each
gets the queries of some tokens, and all keys and values. A rank takes one run of tokens near the beginning and one near
the end, so that causal attention costs the same on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_tiled.attended import attended
from lt_tiled.kept import kept_or
from lt_tiled.modules.patch import without_compiler
from lt_tiled.policies import Keep
from lt_tiled.sequence_parallel.collectives import all_to_all
from lt_tiled.sequence_parallel.region import Region, entered


@dataclass(frozen=True)
class Part:
    """The heads of one rank, and their tokens in its order: all of them, or for queries some runs."""

    heads: slice
    tokens: Sequence[slice]

    def runs(self, region: Region, rank: int) -> list[tuple[slice, slice]]:
        """Return the runs of a rank's own tokens that are in the part: their places in the rank's, and in the part."""
        found, before = [], 0
        first = region.begins[rank]
        for run in self.tokens:
            low, high = max(run.start, first), min(run.stop, first + region.lengths[rank])
            if low < high:
                there = before - run.start
                found.append((slice(low - first, high - first), slice(low + there, high + there)))
            before += run.stop - run.start
        return found

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor of all heads and tokens, ``[B, H, S, ...]``."""
        return torch.cat([whole[:, self.heads, run] for run in self.tokens], 2)


@dataclass(frozen=True)
class Share:
    """What one rank attends with: its query heads, and the key-value heads that they attend to."""

    queries: Part
    keys: Part
    key_of: tuple[int, ...]
    """For each query head the place of its key-value head in ``keys``."""

    @property
    def heads(self) -> slice:
        """The place of the query heads among all of them."""
        return self.queries.heads

    @property
    def uneven(self) -> bool:
        """Whether the key-value heads have different numbers of query heads here, which attention does not support."""
        heads, keys = len(self.key_of), self.keys.heads.stop - self.keys.heads.start
        return heads % keys != 0 or self.key_of != tuple(head * keys // heads for head in range(heads))

    def matched(self, keys: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the key-value heads ``[B, k, S, ...]``, one for each query head where they are uneven."""
        if not self.uneven:
            return list(keys)
        return [key.index_select(1, torch.tensor(self.key_of, device=key.device)) for key in keys]


def shares_of(queries: int, keys: int, size: int, total: int) -> list[Share]:
    """Return what each of ``size`` ranks attends with, of ``queries`` heads on ``keys`` key-value heads."""
    groups = max(count for count in range(1, size + 1) if size % count == 0 and count <= queries)
    each = size // groups  # ranks that have the same heads
    shares: list[Share] = []
    high = 0
    for group in range(groups):
        low, high = high, high + queries // groups + (group < queries % groups)
        first, last = low * keys // queries, (high - 1) * keys // queries
        key_of = tuple(head * keys // queries - first for head in range(low, high))
        everything = Part(slice(first, last + 1), [slice(0, total)])
        for rank in range(each):
            shares.append(Share(Part(slice(low, high), _runs(total, each, rank)), everything, key_of))
    return shares


def _runs(total: int, ranks: int, rank: int) -> list[slice]:
    """Return the tokens whose queries a rank has: of ``2 * ranks`` runs one, and one as far from the end."""
    each, more = divmod(total, 2 * ranks)
    early, late = (
        slice(i * each + min(i, more), (i + 1) * each + min(i + 1, more)) for i in (rank, 2 * ranks - 1 - rank)
    )
    if early.stop == late.start:
        return [slice(early.start, late.stop)]
    return [early, late] if late.start < late.stop else [early]


Attention = Callable[..., Tensor]
"""Computes attention of some heads: from queries ``[B, h, s, D]``, keys and values ``[B, k, S, D]``, the share of the
rank, and parts of vectors, to ``[B, h, s, D]``."""


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
        compute: Gets all tokens of the rank's heads, or, where there are fewer heads than ranks, some of ``queries``.
            It must not hold these tensors: see :func:`~lt_tiled.attended.attended`.
        record: Collects what ``compute`` gets, with the share that it belongs to.
    """
    region.check_recompute()
    region.exchanges += 1
    heads = queries[0].shape[1]
    shares = shares_of(heads, keys[0].shape[1] if keys else heads, region.size, region.total)
    mine, first, last = shares[region.rank], len(queries), len(queries) + len(keys)
    of_ranks = [[share.queries for share in shares]] * len(queries) + [[share.keys for share in shares]] * len(keys)

    def among_heads(*own: Tensor) -> Tensor:
        return compute(mine, own[:first], own[first:last], own[last:])

    def run(*inputs: Tensor) -> Tensor:
        arrived = exchanged(region, of_ranks, inputs[:last], to_heads=True)
        own_queries, own_keys = arrived[:first], arrived[first:]
        if record is not None:
            record.append((mine, *own_queries, *own_keys))
        own_keys = mine.matched(own_keys)
        with entered(None):  # attention may call another one that is exchanged, which has all tokens already
            parts = [vector[mine.heads] for vector in inputs[last:]]
            out = attended("attention_output", among_heads, *own_queries, *own_keys, *parts)
        return exchanged(region, of_ranks[:1], [out], to_heads=False)[0]

    return attended("attention", run, *queries, *keys, *vectors)


Parts = list[list[Part]]
"""For each tensor of an exchange, the part of each rank. Ranks may share key-value heads, and query heads."""


def exchanged(
    region: Region, parts: Parts, tensors: Sequence[Tensor], to_heads: bool, keep: Keep | None = "exchange"
) -> list[Tensor]:
    """Return the tokens of the rank's heads, ``[B, h, s, D]``, for its tokens of all heads, ``[B, H, S/n, D]``.

    With ``to_heads=False`` it is the other way round, and what several ranks have is summed. Each direction is the
    adjoint of the other. A block that keeps ``keep``, or anything with ``None``, keeps what arrives for its recompute.
    """
    found = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors) if region.size > 1 else ():  # one all-to-all sends one dtype
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        outputs = _Exchange.apply(region, [parts[i] for i in places], to_heads, keep, *(tensors[i] for i in places))
        for place, output in zip(places, outputs, strict=True):
            found[place] = output
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, parts: Parts, to_heads: bool, keep: Keep | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = region, parts, not to_heads, keep
        # In a backward pass nothing is kept.
        arrived = kept_or(keep, partial(_arrived, region, parts, to_heads, tensors))
        outputs, begin = [], 0
        for tensor, of_ranks in zip(tensors, parts, strict=True):
            mine = of_ranks[region.rank]
            count, tokens = of_ranks[-1].heads.stop, region.length
            if to_heads:
                count, tokens = mine.heads.stop - mine.heads.start, sum(run.stop - run.start for run in mine.tokens)
            outputs.append(tensor.new_zeros(tensor.shape[0], count, tokens, tensor.shape[3]))
        for view in _views(region, parts, outputs, by_heads=not to_heads):
            its = arrived[begin : begin + view.numel()].view(view.shape)
            begin += view.numel()
            view.copy_(its) if to_heads else view.add_(its)
        return tuple(outputs)

    @staticmethod
    @without_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, None, *_Exchange.apply(*ctx.exchange, *gradients)


def _views(region: Region, parts: Parts, tensors: Sequence[Tensor], by_heads: bool) -> Iterator[Tensor]:
    """Yield what each rank gets of each tensor: its part of this rank's tokens, or its tokens of this rank's part."""
    for rank in range(region.size):
        for tensor, of_ranks in zip(tensors, parts, strict=True):
            if by_heads:
                for own, _ in of_ranks[rank].runs(region, region.rank):
                    yield tensor[:, of_ranks[rank].heads, own]
            else:
                for _, place in of_ranks[region.rank].runs(region, rank):
                    yield tensor[:, :, place]


def _arrived(region: Region, parts: Parts, to_heads: bool, tensors: Sequence[Tensor]) -> Tensor:
    """Send each rank what it gets of these tensors, and return what arrives, as one flat tensor."""
    by_heads, by_tokens = [0] * region.size, [0] * region.size  # the numbers that go to each rank
    for tensor, of_ranks in zip(tensors, parts, strict=True):
        each = tensor.shape[0] * tensor.shape[3]
        for rank in range(region.size):
            by_heads[rank] += each * _size(of_ranks[rank], region, region.rank)
            by_tokens[rank] += each * _size(of_ranks[region.rank], region, rank)
    send, receive = (by_heads, by_tokens) if to_heads else (by_tokens, by_heads)
    packed, begin = tensors[0].new_empty(sum(send)), 0
    for view in _views(region, parts, tensors, by_heads=to_heads):
        # torch.cat would need each part in its order first: two copies
        packed[begin : begin + view.numel()].view(view.shape).copy_(view)
        begin += view.numel()
    arrived: Tensor = all_to_all(packed, send, receive, region.name)
    return arrived


def _size(part: Part, region: Region, rank: int) -> int:
    """Return how many vectors of a rank's tokens are in a part."""
    tokens: int = sum(own.stop - own.start for own, _ in part.runs(region, rank))
    heads: int = part.heads.stop - part.heads.start
    return tokens * heads
