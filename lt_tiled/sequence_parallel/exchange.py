"""The exchange around what mixes tokens: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

This is DeepSpeed-Ulysses (arXiv:2309.14509) with one all-to-all for queries, keys and values together, for any number
of query heads that is not below the number of ranks, and any number of key-value heads, which several ranks may need.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lt_tiled.sequence_parallel.groups import all_to_all, check_same_block, name_of
from lt_tiled.sequence_parallel.ulysses import UlyssesState, held, shared_pass

block_name: ContextVar[str] = ContextVar("block_name", default="")
"""The block that began last."""


def head_shards(heads: int, key_heads: int, size: int) -> dict[str, list[list[int]]]:
    """Return which of ``heads`` query heads, on ``key_heads`` key-value heads, each of ``size`` ranks computes.

    Returns:
        ``"heads"``: for each rank its query heads. Where there are fewer than the other ranks have, the last one is
        repeated. ``"key_heads"``: the key-value heads of these, each once, or once for each query head.
    """
    each = -(-heads // size)
    queries: list[list[int]] = []
    keys: list[list[int]] = []
    for rank in range(size):
        mine = [min(head, heads - 1) for head in range(rank * each, (rank + 1) * each)]
        queries.append(mine)
        keys.append([head * key_heads // heads for head in mine])
    # Attention wants equally many query heads for each key-value head, and all ranks send equally many.
    if heads % size == key_heads % size == 0 or all(len(set(needed)) == 1 for needed in keys):
        keys = [sorted(set(needed)) for needed in keys]
    return {"heads": queries, "key_heads": keys}


def next_exchange(state: UlyssesState, function: str) -> None:
    """Agree with the other ranks on what exchanges tokens next, and note it."""
    check_same_block(state.group, f"{block_name.get()}: {function}")
    state.exchanges.append(function)


def over_heads(
    state: UlyssesState, function: str, kinds: Mapping[str, str], tensors: Mapping[str, Tensor], compute: Any
) -> Tensor:
    """Compute what mixes the tokens of each head for a rank's tokens of all heads, ``[B, H, S/n, D]``.

    Args:
        state: The state of the shared pass.
        function: The name of what computes.
        kinds: What the entries of each tensor belong to: ``"heads"`` or ``"key_heads"``, ``[B, heads, S/n, D]``, or a
            ``"vector"`` of heads without tokens, ``[H, ...]``.
        tensors: The tensors by their names.
        compute: Gets the query heads of the rank, and by name all tokens of its heads; returns ``[B, h, S, D]``.
    """
    next_exchange(state, function)
    # 1. The heads of each rank.
    count: dict[str, int] = {}
    for name, tensor in tensors.items():
        if kinds[name] == "vector":
            continue
        count[kinds[name]] = tensor.shape[1]
        if tensor.dim() != 4 or tensor.shape[2] != state.length:
            raise ValueError(
                f"{state.owner} was given a {name} of the shape {list(tensor.shape)}. Sequence parallelism needs"
                f" self-attention of all {state.length} tokens of the rank, [B, heads, {state.length}, D]: use another"
                " attention, or name modules without this one in SequenceParallel(targets=...)."
            )
    heads = count["heads"]
    if heads < state.group.size():
        raise ValueError(
            f"sequence_parallel={state.group.size()} needs as many query heads (or heads of a state), and"
            f" {state.owner} has {heads}: use sequence_parallel={heads} or less."
        )
    shards = head_shards(heads, count["key_heads"], state.group.size())
    mine = shards["heads"][state.group.rank()]
    # 2. What is sent, and what is only cut.
    sent: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if kinds[name] == "vector":
            own[name] = tensor[mine]
        else:
            places = list(chain.from_iterable(shards[kinds[name]]))
            if places != list(range(tensor.shape[1])):
                tensor = tensor.index_select(1, torch.tensor(places, device=tensor.device))
            sent[name] = tensor
    # 3. All tokens of the rank's heads.
    own |= to_heads(state, sent)
    # 4. Outside of the shared pass: attention may call another one that is exchanged, which has all tokens already.
    with held(shared_pass, None):
        out: Tensor = compute(mine, **own)
    # 5. All heads of the rank's tokens.
    return to_tokens(state, out)[:, :heads]


def to_heads(state: UlyssesState, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tokens of the rank's heads, ``[B, h, S, D]``, for its tokens of all heads, ``[B, nh, S/n, D]``."""
    parts: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part = tensor.unflatten(1, (state.group.size(), -1)).movedim(1, 0)  # [n, B, h, S/n, D]
        parts.setdefault(tensor.dtype, {})[name] = part
    found: dict[str, Tensor] = {}
    for same in parts.values():  # one all-to-all sends one dtype
        packed = torch.cat([part.flatten(1) for part in same.values()], 1)
        arrived = all_to_all(packed, name_of(state.group)).split([part[0].numel() for part in same.values()], 1)
        for (name, part), piece in zip(same.items(), arrived, strict=True):
            # Without the tokens that repeat the last one.
            found[name] = piece.view(part.shape).movedim(0, 2).flatten(2, 3).narrow(2, 0, state.total)
    return found


def to_tokens(state: UlyssesState, x: Tensor) -> Tensor:
    """Return the rank's tokens of all heads, ``[B, nh, S/n, D]``, for all tokens of its heads, ``[B, h, S, D]``."""
    padded = state.part(x, 2, 0, state.group.size() * state.length)
    part = padded.unflatten(2, (state.group.size(), -1)).movedim(2, 0)  # [n, B, h, S/n, D]
    arrived: Tensor = all_to_all(part, name_of(state.group))
    return arrived.movedim(0, 1).flatten(1, 2)
