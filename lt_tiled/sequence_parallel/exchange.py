"""The exchange around attention: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of heads that is not below the size of the group, any number of key-value heads and any lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lt_tiled.sequence_parallel.kept import attended, exchanged
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
    q, k, v = _to_heads(region, shares, query, key, value)
    if region.record is not None:
        region.record.append((mine, q, k, v))
    if mine.uneven:
        index = torch.tensor(mine.key_of, device=key.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    with entered(None):  # attention may call another one that is exchanged, which has all tokens already
        out = attention(q, k, v, mine.queries)
    return _to_tokens(region, [s.queries.stop - s.queries.start for s in shares], out)


def _to_heads(region: Region, shares: list[Share], *tensors: Tensor) -> list[Tensor]:
    """Exchange ``[B, H, S/n, D]`` of all heads for ``[B, h, S, D]`` of the rank's heads, for queries, keys, values."""
    parts = [[t[:, s.queries if t is tensors[0] else s.keys] for t in tensors] for s in shares]
    if region.size == 1:
        return parts[0]
    batch, mine = tensors[0].shape[0], parts[region.rank]
    send = [sum(p.numel() for p in part) for part in parts]
    widths = [p.shape[1] * p.shape[3] for p in mine]
    receive = [batch * length * sum(widths) for length in region.lengths]
    packed = torch.cat([p.reshape(-1) for part in parts for p in part])
    arrived = exchanged(packed, send, receive, region.name).split(receive)
    from_ranks = [
        chunk.split([batch * length * width for width in widths])
        for chunk, length in zip(arrived, region.lengths, strict=True)
    ]
    return [
        torch.cat(
            [
                chunks[index].view(batch, part.shape[1], length, part.shape[3])
                for chunks, length in zip(from_ranks, region.lengths, strict=True)
            ],
            2,
        )
        for index, part in enumerate(mine)
    ]


def _to_tokens(region: Region, heads: list[int], out: Tensor) -> Tensor:
    """Exchange ``[B, h, S, D]`` of the rank's heads for ``[B, H, S/n, D]`` of all heads."""
    if region.size == 1:
        return out
    batch, _, _, width = out.shape
    parts = out.split(region.lengths, 2)
    receive = [batch * count * region.length * width for count in heads]
    packed = torch.cat([part.reshape(-1) for part in parts])
    arrived = exchanged(packed, [part.numel() for part in parts], receive, region.name).split(receive)
    shapes = [(batch, count, region.length, width) for count in heads]
    return torch.cat([chunk.view(shape) for chunk, shape in zip(arrived, shapes, strict=True)], 1)
