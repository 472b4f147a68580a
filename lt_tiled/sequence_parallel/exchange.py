"""The exchange around attention: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of heads that is not below the size of the group, any number of key-value heads and any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from lt_tiled.sequence_parallel.collectives import all_to_all
from lt_tiled.sequence_parallel.kept import attended, kept
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
    each, more = divmod(queries, size)
    cuts = accumulate([each + (rank < more) for rank in range(size)], initial=0)
    shares = []
    for low, high in pairwise(cuts):
        of = [head * keys // queries for head in range(low, high)]
        shares.append(Share(slice(low, high), slice(of[0], of[-1] + 1), tuple(key - of[0] for key in of)))
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
    if len({t.dtype for t in (query, key, value)}) == 1:
        q, k, v = _to_heads(region, [queries, keys, keys], query, key, value)
    else:
        q, k, v = (_to_heads(region, [h], t)[0] for h, t in ((queries, query), (keys, key), (keys, value)))
    if region.record is not None:
        region.record.append((mine, q, k, v))
    if mine.uneven:
        index = torch.tensor(mine.key_of, device=key.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    with entered(None):  # attention may call another one that is exchanged, which has all tokens already
        out = attention(q, k, v, mine.queries)
    return _to_tokens(region, [queries], out)[0]


def _to_heads(region: Region, heads: list[list[slice]], *tensors: Tensor) -> Sequence[Tensor]:
    """Exchange ``[B, H, S/n, D]`` of all heads for ``[B, h, S, D]`` of the rank's heads."""
    return tensors if region.size == 1 else _ToHeads.apply(_Exchange(region, heads), *tensors)


def _to_tokens(region: Region, heads: list[list[slice]], *tensors: Tensor) -> Sequence[Tensor]:
    """Exchange ``[B, h, S, D]`` of the rank's heads for ``[B, H, S/n, D]`` of all heads."""
    return tensors if region.size == 1 else _ToTokens.apply(_Exchange(region, heads), *tensors)


@dataclass(frozen=True)
class _Exchange:
    """An exchange of heads for tokens, and the reverse one, which is its adjoint.

    Attributes:
        region: Tells which tokens each rank has.
        heads: For each tensor, the heads of each rank. Ranks may share heads.
    """

    region: Region
    heads: list[list[slice]]

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens of all ranks, of the rank's heads."""
        region, like = self.region, tensors[0]
        parts = [[t[:, h[rank]] for t, h in zip(tensors, self.heads, strict=True)] for rank in range(region.size)]
        mine = [part.shape for part in parts[region.rank]]
        shapes = [[(b, h, length, d) for b, h, _, d in mine] for length in region.lengths]
        results = [like.new_empty(b, h, region.total, d) for b, h, _, d in mine]
        for arrived, place in zip(self._exchanged(parts, shapes), self._tokens, strict=True):
            for result, part in zip(results, arrived, strict=True):
                result[:, :, place] = part
        return tuple(results)

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return all heads of the rank's tokens, summed where ranks share heads."""
        region, like = self.region, tensors[0]
        parts = [[t[:, :, place] for t in tensors] for place in self._tokens]
        shapes = [
            [(t.shape[0], _count(h[rank]), region.length, t.shape[3]) for t, h in zip(tensors, self.heads, strict=True)]
            for rank in range(region.size)
        ]
        results = [like.new_empty(b, h[-1].stop, n, d) for (b, _, n, d), h in zip(shapes[0], self.heads, strict=True)]
        for rank, arrived in enumerate(self._exchanged(parts, shapes)):
            for result, heads, part in zip(results, self.heads, arrived, strict=True):
                low, high, done = heads[rank].start, heads[rank].stop, heads[rank - 1].stop if rank else 0
                shared = max(0, min(done, high) - low)
                result[:, low : low + shared] += part[:, :shared]
                result[:, low + shared : high] = part[:, shared:]
        return tuple(results)

    @property
    def _tokens(self) -> list[slice]:
        return [slice(low, high) for low, high in pairwise(accumulate(self.region.lengths, initial=0))]

    def _exchanged(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> Iterator[Sequence[Tensor]]:
        """Send each rank its parts, and yield those that arrive from each rank, of these shapes."""

        def communicate() -> Any:
            send = [sum(part.numel() for part in of_rank) for of_rank in parts]
            receive = [sum(map(prod, of_rank)) for of_rank in shapes]
            packed = parts[0][0].new_empty(sum(send))
            places = iter(packed.split([part.numel() for of_rank in parts for part in of_rank]))
            for part in (part for of_rank in parts for part in of_rank):
                next(places).view(part.shape).copy_(part)
            return all_to_all(packed, send, receive, self.region.name)

        where = kept("exchange")  # in a backward pass there is none
        flat = communicate() if where is None else where.value(communicate, where.pack, where.unpack)
        arrived = iter(flat.split([prod(shape) for of_rank in shapes for shape in of_rank]))
        for of_rank in shapes:
            yield [next(arrived).view(shape) for shape in of_rank]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.to_heads(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_ToTokens.apply(ctx.exchange, *gradients)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.to_tokens(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_ToHeads.apply(ctx.exchange, *gradients)


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)
