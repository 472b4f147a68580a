"""The calls of an attention function that together compute the share of one rank.

It is one call, unless the rank has several documents, or several runs of the tokens because there are fewer query heads
than ranks. The last query of a run sees the last key of its call: the causal mask is aligned to the lower right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from lt_tiled.sequence_parallel.arguments import DOCUMENTS
from lt_tiled.sequence_parallel.exchange import Share
from lt_tiled.sequence_parallel.positions import documents_of, lengths_of
from lt_tiled.sequence_parallel.region import Region

TELL_DOCUMENTS = (*DOCUMENTS, "position_ids")
"""How arguments begin from which flash attention finds packed documents."""
_ALL_OR_NONE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Those that transformers reads only together."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention function with some of the queries of a rank, and the keys that they see."""

    queries: slice
    """Places among the queries of the rank."""
    keys: slice
    """Places among all tokens."""
    mask: Any
    causal: bool
    is_square: bool
    """Whether the keys are of the same tokens as the queries."""

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _run(query, self.queries), _run(key, self.keys), _run(value, self.keys)

    def lower_right(self) -> Any:
        """Return the causal mask of which the last query sees the last key: none for one query, which sees all."""
        queries = self.queries.stop - self.queries.start
        return None if queries == 1 else LowerRight(queries, self.keys.stop - self.keys.start)


class LowerRight:
    """A causal mask of which the last query sees the last key, for ``F.scaled_dot_product_attention``.

    It takes the place of torch's ``causal_lower_right``, a tensor of ``2 * queries * keys`` entries, and as that one
    lets the kernels for CUDA do without a mask:
    https://github.com/pytorch/pytorch/blob/main/torch/nn/attention/bias.py
    """

    variant = CausalVariant.LOWER_RIGHT

    def __init__(self, queries: int, keys: int) -> None:
        self.seq_len_q, self.seq_len_kv = queries, keys

    def _materialize(self, device: torch.device) -> Tensor:
        everything = torch.ones(self.seq_len_q, self.seq_len_kv, dtype=torch.bool, device=device)
        return everything.tril_(self.seq_len_kv - self.seq_len_q)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return NotImplemented
        device = args[0].device.type
        if torch.is_autocast_enabled(device):  # which casts what a kernel is given, and not what this function is
            dtype = torch.get_autocast_dtype(device)
            args = (*(t.to(dtype) if t.is_floating_point() else t for t in args[:3]), *args[3:])
        return CausalBias._dispatch(*args, **kwargs or {})


def _run(x: Tensor, tokens: slice) -> Tensor:
    """Return some tokens of a tensor, which is returned as it is if they are all: a view would cost a copy backward."""
    return x if tokens.stop - tokens.start == x.shape[2] else x[:, :, tokens]


def calls_of(
    region: Region, mine: Share, documents: Sequence[int] | None, mask: Any, causal: bool
) -> Iterator[AttentionCall]:
    """Yield the calls that together compute a rank's share: one, unless it has several runs of tokens, or documents."""
    ends = [0, *accumulate(documents or [region.total])]
    if ends[-1] != region.total:
        raise ValueError(
            f"{region.owner} was given documents of {ends[-1]} tokens, where each of its rows has {region.total}: with"
            " fewer query heads than ranks, pack all documents in one row."
        )
    before = 0
    for run in mine.queries.tokens:
        for begin, end in pairwise(ends):
            low, high = max(run.start, begin), min(run.stop, end)
            if low >= high:
                continue
            queries = slice(before + low - run.start, before + high - run.start)
            keys = slice(begin, high if causal and mask is None else end)
            rows = isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-2] == region.total
            own = mask[..., low:high, :] if rows and high - low < region.total else mask
            yield AttentionCall(queries, keys, own, causal, (keys.start, keys.stop) == (low, high))
        before += run.stop - run.start


def documents_told(arguments: Mapping[str, Any]) -> list[int] | None:
    """Return the lengths of the documents in a row, as flash attention of transformers reads them in its arguments."""
    ends, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if isinstance(ends, Tensor) and all(arguments.get(name) is not None for name in _ALL_OR_NONE):
        return list(map(int, ends.diff()))
    if not isinstance(positions, Tensor) or len(positions) > 1 or len(documents_of(positions)) == 1:
        return None
    starts = (positions[0] == positions.min()).nonzero().flatten().tolist()  # a gap alone begins none
    return lengths_of(starts, positions.shape[-1])


def mask_of(region: Region, mask: Any, mine: slice, heads: int) -> Any:
    """Return the mask of a rank's heads, or refuse one that is not for all tokens."""
    if mask is None:
        return None
    keys, queries = mask.shape[-1], mask.shape[-2] if len(mask.shape) > 2 else 1  # [B, S] is padding
    if keys not in (1, region.total) or queries not in (1, region.total):
        raise ValueError(
            f"{region.owner} was given an attention mask of the shape {list(mask.shape)}, which is not that of all"
            f" {region.total} tokens. Make masks before the first block, or leave them out for causal attention."
        )
    several = len(mask.shape) > 2 and mask.shape[-3] == heads > 1
    return mask[(slice(None),) * (len(mask.shape) - 3) + (mine,)] if several else mask
