"""Where attention is found: in the attention interface of transformers, and in calls of torch's function.

Outside of a shared pass it is computed as always, and a block with activation checkpointing may keep it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lt_tiled.recompute.keep import attending
from lt_tiled.sequence_parallel.exchange import HeadShard, over_heads
from lt_tiled.sequence_parallel.ulysses import UlyssesState, current


class Replacement:
    """Takes the place of a function in a table, or in a module, while it has users.

    Args:
        run: Gets the function that was there, and the arguments.
        function: What was there.
    """

    def __init__(self, run: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.run, self.function = run, function
        self.users = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.function, *args, **kwargs)


def replace(table: Any, name: str, run: Callable[..., Any], undo: ExitStack) -> None:
    """Replace a function of a table until ``undo`` is closed, by the last one of several users."""
    function = table[name]
    shared = function if isinstance(function, Replacement) else Replacement(run, function)
    shared.users += 1
    table[name] = shared
    undo.callback(_restore, table, name, shared)


def _restore(table: Any, name: str, shared: Replacement) -> None:
    """Restore a function when its last user leaves, unless others replaced it since."""
    shared.users -= 1
    if shared.users == 0 and table.get(name) is shared:
        del table[name]  # the table falls back to what is registered
        if table.get(name) is not shared.function:
            table[name] = shared.function


# In the interface of transformers


def _interface(
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an attention function of transformers, which in a shared pass attends to the tokens of all ranks."""
    state = current()
    if state is None:
        with attending():
            return function(module, query, key, value, attention_mask, *args, **kwargs)
    # 1. What depends on all tokens.
    mask = state.mask if isinstance(state.decoder_mask, Tensor) else attention_mask
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = state.positions
    lengths = list(state.documents) if mask is None and state.documents else [state.total]
    heads, sinks = query.shape[1], kwargs.get("s_aux")

    def attention(q: Tensor, k: Tensor, v: Tensor, mine: HeadShard, *own_sinks: Tensor) -> Tensor:
        part, options = _Grouped(module, q.shape[1] // k.shape[1]), kwargs
        if own_sinks:
            part.__dict__["sinks"] = own_sinks[0]  # where eager attention finds them
            options = kwargs | {"s_aux": own_sinks[0]}
        # 2. Each document attends to itself alone.
        own_mask, outputs = _mask_of(state, mask, mine.heads, heads), []
        for own in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True):
            outputs.append(function(part, *own, own_mask, *args, **options)[0])
        out: Tensor = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return out.transpose(1, 2)

    vectors = [] if sinks is None else [sinks]
    return attend(state, query, key, value, attention, vectors).transpose(1, 2).contiguous(), None


class _Grouped:
    """An attention module as its function sees it, with the number of query heads for each key-value head here."""

    def __init__(self, module: Any, groups: int) -> None:
        self.__dict__.update(_module=module, num_key_value_groups=groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_EAGER = "eager_attention_forward"
"""The function of a model's file that is not in the table, because each has its own."""


def find_sinks(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return the contents of the files of transformers whose eager attention has sinks, which sdpa lacks."""
    files: dict[str, dict[str, Any]] = {}
    for part in (part for module in modules for part in module.modules()):
        if hasattr(part, "sinks") and hasattr(file := sys.modules[type(part).__module__], _EAGER):
            files[file.__name__] = vars(file)
    return list(files.values())


def share_interface(modules: Sequence[nn.Module], undo: ExitStack) -> None:
    """Wrap the attention functions of transformers, and eager attention with sinks in the files of these modules.

    The last one of several users restores them when its ``undo`` is closed.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    for name in list(TABLE):
        replace(TABLE, name, _interface, undo)
    for file in find_sinks(modules):
        replace(file, _EAGER, _interface, undo)


# In hand-written models


class AttentionMode(TorchFunctionMode):
    """Lets ``F.scaled_dot_product_attention`` attend to the tokens of all ranks in a shared pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state, kwargs = current(), kwargs or {}
        if state is None or func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = _SDPA.bind(*args, **kwargs).arguments
        query, key, value, mask = (call.pop(name, None) for name in ("query", "key", "value", "attn_mask"))
        heads, causal = query.shape[1], call.pop("is_causal", False)
        if mask is not None and mask.dim() == 2:
            mask = mask[None]  # of queries and keys, where transformers means padding

        grouped = call.pop("enable_gqa", False)  # one key head may be broadcast instead

        def attention(q: Tensor, k: Tensor, v: Tensor, mine: HeadShard) -> Tensor:
            options = call | {"is_causal": causal, "enable_gqa": grouped and q.shape[1] != k.shape[1]}
            out: Tensor = func(q, k, v, _mask_of(state, mask, mine.heads, heads), **options)
            return out

        return attend(state, query, key, value, attention)


def attend(
    state: UlyssesState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Callable[..., Tensor],
    vectors: Sequence[Tensor] = (),
) -> Tensor:
    """Compute the attention of a rank's tokens ``[B, H, S/n, D]`` to the tokens of all ranks.

    ``attention`` gets queries ``[B, h, S, D]``, keys and values ``[B, k, S, D]``, the head shard of the rank, and its
    heads' part of ``vectors``, which have an entry for each query head.
    """
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 or shape[2] != state.length for shape in shapes):
        raise ValueError(
            f"{state.owner} was given queries, keys and values of the shapes {shapes}. Sequence parallelism needs"
            f" self-attention of all {state.length} tokens of the rank, [B, heads, {state.length}, D]: use another"
            " attention, or name modules without this one in SequenceParallel(targets=...)."
        )

    def compute(mine: HeadShard, queries: Sequence[Tensor], keys: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        return attention(*queries, *keys, mine, *own)

    return over_heads(state, "attention", [query], [key, value], vectors, compute)


def _mask_of(state: UlyssesState, mask: Any, mine: list[int], heads: int) -> Any:
    """Return the mask of a rank's heads, or refuse one that is not for all tokens."""
    if mask is None:
        return None
    keys, queries = mask.shape[-1], mask.shape[-2] if len(mask.shape) > 2 else 1  # [B, S] is padding
    if keys not in (1, state.total) or queries not in (1, state.total):
        raise ValueError(
            f"{state.owner} was given an attention mask of the shape {list(mask.shape)}, which is not that of all"
            f" {state.total} tokens. Make masks before the first block, or leave them out for causal attention."
        )
    several = len(mask.shape) > 2 and mask.shape[-3] == heads > 1
    return mask[(slice(None),) * (len(mask.shape) - 3) + (mine,)] if several else mask


def calls_attention(module: nn.Module) -> bool:
    """Whether a module of transformers in a module calls torch's attention itself, as those of Falcon do."""
    codes = [getattr(inspect.unwrap(type(part).forward), "__code__", None) for part in module.modules()]
    return any(code is not None and "scaled_dot_product_attention" in code.co_names for code in codes)


def shared_attention(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention function that attends to the tokens of all ranks that share a sequence.

    Use it in hand-written models for functions other than ``F.scaled_dot_product_attention``, such as
    ``flex_attention``: ``attention = shared_attention(flex_attention)``.

    Args:
        function: Takes queries ``[B, H, S, D]``, keys and values ``[B, K, S, D]``, and other arguments, which are
            passed unchanged. If ranks share a sequence, it is called with a part of the heads. So masks must cover all
            tokens and be the same for every head.

    Returns:
        The function with the same arguments.
    """

    @wraps(function)
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state = current()
        if state is None:
            with attending():
                return function(query, key, value, *args, **kwargs)

        def own(q: Tensor, k: Tensor, v: Tensor, mine: HeadShard) -> Tensor:
            return function(q, k, v, *args, **kwargs)

        return attend(state, query, key, value, own)

    uncompiled: Callable[..., Tensor] = torch.compiler.disable(attention)
    return uncompiled


_SDPA = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)
"""The arguments of ``F.scaled_dot_product_attention``, a builtin that tells no signature."""
