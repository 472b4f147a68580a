"""The exchange around what mixes tokens: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of query heads that is not below the number of ranks, and any number of key-value heads, which several ranks may need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lt_tiled.recompute.keep import attending
from lt_tiled.recompute.mode import in_checkpoint, is_backward
from lt_tiled.sequence_parallel.agreement import check_same_block
from lt_tiled.sequence_parallel.collectives import all_to_all
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
    refuse_checkpoint(state.owner, in_checkpoint() and pack_hook() is not hook)
    if not is_backward():  # a recompute repeats what the ranks agreed on
        check_same_block(state.owner, state.group, f"{function} in {name}", tensor)
    state.calls.append(function)


def refuse_checkpoint(owner: str, found: bool) -> None:
    """Raise ``ValueError`` if a checkpoint was found that is not lt_tiled's: its recompute forgets the shared pass."""
    if found:
        raise ValueError(
            f"{owner} has activation checkpointing of its own in its blocks or around them. With sequence parallelism"
            " its recompute would see the tokens of one rank. Use lt_tiled's (activation_checkpointing=True) in place"
            " of gradient_checkpointing_enable() or torch's checkpoint."
        )


# Which rank computes which heads


@dataclass(frozen=True)
class HeadShard:
    """The heads that one rank computes, by their places among all of them."""

    heads: list[int]
    """Its query heads. Where there are fewer than the other ranks have, the last one is repeated."""
    keys: list[int]
    """The key-value heads that these attend to: one for each group of them, or one for each."""


def head_shards(queries: int, keys: int, size: int) -> list[HeadShard]:
    """Return what each of ``size`` ranks computes, of ``queries`` heads on ``keys`` key-value heads."""
    each = -(-queries // size)
    heads = [[min(head, queries - 1) for head in range(rank * each, (rank + 1) * each)] for rank in range(size)]
    key_of = [[head * keys // queries for head in mine] for mine in heads]
    # On all ranks equally many key-value heads have equally many query heads, as attention wants it.
    grouped = [sorted(set(of)) for of in key_of]
    count = len(grouped[0])
    if each % count == 0 and key_of == [sorted(mine * (each // count)) for mine in grouped]:
        key_of = grouped
    return [HeadShard(mine, of) for mine, of in zip(heads, key_of, strict=True)]


def _chosen(x: Tensor, places: Iterable[int]) -> Tensor:
    """Return some heads of a tensor ``[B, H, S, D]``."""
    chosen = list(places)
    return x if chosen == list(range(x.shape[1])) else x.index_select(1, torch.tensor(chosen, device=x.device))


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
    if heads < state.size:
        raise ValueError(
            f"sequence_parallel={state.size} needs as many query heads (or heads of a state), and {state.owner} has"
            f" {heads}: use sequence_parallel={heads} or less."
        )
    shards = head_shards(heads, keys[0].shape[1], state.size)
    mine = shards[state.rank]
    sent = [_chosen(tensor, chain.from_iterable(shard.heads for shard in shards)) for tensor in queries]
    sent += [_chosen(tensor, chain.from_iterable(shard.keys for shard in shards)) for tensor in keys]

    with attending():
        # 1. All tokens of the rank's heads.
        arrived = to_heads(state, sent)
        # 2. Outside of the shared pass: attention may call another one that is exchanged, which has all tokens already.
        with entered(None):
            parts = [vector[mine.heads] for vector in vectors]
            out = compute(mine, arrived[: len(queries)], arrived[len(queries) :], parts)
        # 3. All heads of the rank's tokens.
        return to_tokens(state, out)[:, :heads]


def to_heads(state: UlyssesState, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return all tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, nh, S/n, D]``."""
    found = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # one all-to-all sends one dtype
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        parts = [tensors[place].unflatten(1, (state.size, -1)).movedim(1, 0) for place in places]  # [n, B, h, S/n, D]
        for place, part in zip(places, _exchanged(state, parts), strict=True):
            # Without the tokens that repeat the last one.
            found[place] = part.movedim(0, 2).flatten(2, 3).narrow(2, 0, state.total)
    return found


def to_tokens(state: UlyssesState, x: Tensor) -> Tensor:
    """Return the rank's tokens of all heads, ``[B, nh, S/n, D]``, for all tokens of its heads, ``[B, h, S, D]``."""
    part = state.padded(x, 2).unflatten(2, (state.size, -1)).movedim(2, 0)  # [n, B, h, S/n, D]
    return _exchanged(state, [part])[0].movedim(0, 1).flatten(1, 2)


def _exchanged(state: UlyssesState, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send each rank its entry of each tensor ``[n, ...]``, and return those that arrive, in one all-to-all."""
    flat = [part.flatten(1) for part in parts]
    packed = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
    arrived = all_to_all(packed, state.name).split([part.shape[1] for part in flat], 1)
    return [piece.reshape(part.shape) for piece, part in zip(arrived, parts, strict=True)]
