"""The exchange around attention: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of heads that is not below the size of the group, any number of key-value heads and any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
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
    if query.dtype == key.dtype == value.dtype:
        q, k, v = _exchanged(_to_heads, region, [queries, keys, keys], query, key, value)
    else:  # one all-to-all sends one dtype
        pairs = ((queries, query), (keys, key), (keys, value))
        q, k, v = (_exchanged(_to_heads, region, [heads], tensor)[0] for heads, tensor in pairs)
    if region.record is not None:
        region.record.append((mine, q, k, v))
    if mine.uneven:
        index = torch.tensor(mine.key_of, device=key.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    with entered(None):  # attention may call another one that is exchanged, which has all tokens already
        out = attention(q, k, v, mine.queries)
    return _exchanged(_to_tokens, region, [queries], out)[0]


Heads = list[list[slice]]
"""For each tensor of an exchange, the heads of each rank. Ranks may share key-value heads."""
Direction = Callable[[Region, Heads, Sequence[Tensor]], tuple[Tensor, ...]]


def _exchanged(direction: Direction, region: Region, heads: Heads, *tensors: Tensor) -> Sequence[Tensor]:
    return tensors if region.size == 1 else _Exchange.apply(direction, region, heads, *tensors)


class _Exchange(torch.autograd.Function):
    """An exchange of tokens for heads, or of heads for tokens, each of which is the adjoint of the other."""

    @staticmethod
    def forward(ctx: Any, direction: Direction, region: Region, heads: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.adjoint = (_to_tokens if direction is _to_heads else _to_heads), region, heads
        return direction(region, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_Exchange.apply(*ctx.adjoint, *gradients)


def _to_heads(region: Region, heads: Heads, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return all tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, H, S/n, D]``."""
    parts = [[t[:, h[rank]] for t, h in zip(tensors, heads, strict=True)] for rank in range(region.size)]
    mine = [part.shape for part in parts[region.rank]]
    shapes = [[(b, h, length, d) for b, h, _, d in mine] for length in region.lengths]
    return tuple(torch.cat(of_ranks, 2) for of_ranks in zip(*_sent(region, parts, shapes), strict=True))


def _to_tokens(region: Region, heads: Heads, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return all heads of the rank's tokens, summed where ranks share heads, for all tokens of its heads."""
    parts = list(zip(*(t.split(region.lengths, 2) for t in tensors), strict=True))
    shapes = [
        [(len(t), h[rank].stop - h[rank].start, region.length, t.shape[3]) for t, h in zip(tensors, heads, strict=True)]
        for rank in range(region.size)
    ]
    arrived = zip(*_sent(region, parts, shapes), strict=True)
    return tuple(_joined(h, of_ranks) for h, of_ranks in zip(heads, arrived, strict=True))


def _joined(heads: Sequence[slice], parts: tuple[Tensor, ...]) -> Tensor:
    """Return all heads of the ranks' parts ``[B, h, S/n, D]``, summed where ranks share heads."""
    if sum(part.shape[1] for part in parts) == heads[-1].stop:
        return torch.cat(parts, 1)
    first = parts[0]
    whole = first.new_zeros(len(first), heads[-1].stop, *first.shape[2:])
    for of_rank, part in zip(heads, parts, strict=True):
        whole[:, of_rank] += part
    return whole


def _sent(
    region: Region, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """Send each rank its parts, and return those that arrive from each rank, of these shapes."""

    def communicate() -> Tensor:
        send = [sum(part.numel() for part in of_rank) for of_rank in parts]
        receive = [sum(map(prod, of_rank)) for of_rank in shapes]
        packed = parts[0][0].new_empty(sum(send))
        places = iter(packed.split([part.numel() for of_rank in parts for part in of_rank]))
        for part in (part for of_rank in parts for part in of_rank):
            next(places).view(part.shape).copy_(part)  # torch.cat would need each part in its order first: two copies
        arrived: Tensor = all_to_all(packed, send, receive, region.name)
        return arrived

    flat = kept_or("exchange", communicate)  # in a backward pass nothing is kept
    arrived = iter(flat.split([prod(shape) for of_rank in shapes for shape in of_rank]))
    return [[next(arrived).view(shape) for shape in of_rank] for of_rank in shapes]
