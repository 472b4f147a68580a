"""Where attention is found: in the attention functions of transformers, and in torch's own.

Outside of a shared pass it is computed as always.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled.sequence_parallel.exchange import over_heads
from lt_tiled.sequence_parallel.ulysses import UlyssesState, shared_pass

ATTENTION = {"query": "heads", "key": "key_heads", "value": "key_heads", "sinks": "vector"}
"""The tensors of attention, and what their entries belong to."""
SDPA = F.scaled_dot_product_attention


class ReplacedFunction:
    """Calls a function, and in a shared pass ``run`` in its place, with the state, the function and its arguments."""

    users = 0

    def __init__(self, run: Callable[..., Any], function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.run = run
        self.function = function

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = shared_pass.get()
        if state is not None:
            return self.run(state, self.function, *args, **kwargs)
        return self.function(*args, **kwargs)


def replace(table: Any, name: str, run: Callable[..., Any], undo: ExitStack) -> None:
    """Let ``run`` share a function of a table until ``undo`` is closed."""
    replaced = table[name]
    if not isinstance(replaced, ReplacedFunction):
        replaced = table[name] = ReplacedFunction(run, replaced)
    replaced.users += 1

    def restore() -> None:  # with the last user, unless others replaced it since
        replaced.users -= 1
        if replaced.users == 0 and table.get(name) is replaced:
            table[name] = replaced.function

    undo.callback(restore)


# In transformers


def share_interface(undo: ExitStack) -> None:
    """Replace the attention functions of transformers until ``undo`` is closed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    for name in list(TABLE):
        replace(TABLE, name, attend, undo)


def attend(
    state: Any, function: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Run an attention function of transformers on the tokens of all ranks."""
    # 1. What depends on all tokens.
    if given.get("position_ids") is not None:
        given["position_ids"] = state.positions
    lengths = [state.total]
    if attention_mask is None and state.documents:
        lengths = list(state.documents)
    heads = query.shape[1]
    tensors = {"query": query, "key": key, "value": value}
    if given.get("s_aux") is not None:
        tensors["sinks"] = given["s_aux"]

    def compute(mine: list[int], query: Tensor, key: Tensor, value: Tensor, sinks: Any = None) -> Tensor:
        # 2. The module as its function sees it, with the numbers of heads and the sinks of this rank.
        part = object.__new__(type(module))
        vars(part).update(vars(module), num_key_value_groups=query.shape[1] // key.shape[1])
        own = dict(given)
        if sinks is not None:
            vars(part)["sinks"] = own["s_aux"] = sinks
        own_mask = _mask_of(state, attention_mask, mine, heads)
        # 3. Each document attends to itself alone.
        outputs: list[Tensor] = []
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
            outputs.append(function(part, q, k, v, own_mask, **own)[0])
        out = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        return out.transpose(1, 2)

    return over_heads(state, "attention", ATTENTION, tensors, compute).transpose(1, 2).contiguous(), None


def mask_of_all(state: UlyssesState, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the mask of all tokens from a function that a model gives the embeddings of a rank's own."""
    if state.documents and function.__name__ == "create_causal_mask":
        return None  # attention runs once for each of them
    given = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
    given["inputs_embeds"] = given["inputs_embeds"][:, :1, :1].expand(-1, state.total, 1)
    return function(**given)


def _mask_of(state: UlyssesState, mask: Any, mine: list[int], heads: int) -> Any:
    """Return the mask of a rank's heads, or refuse one that is not for all tokens."""
    if mask is None:
        return None
    dims = len(mask.shape)
    sizes = mask.shape[-2:] if dims > 2 else mask.shape[-1:]  # of queries and keys, or [B, S] of padding
    if not {1, state.total}.issuperset(sizes):
        raise ValueError(
            f"{state.owner} was given an attention mask of the shape {list(mask.shape)}, which is not that of all"
            f" {state.total} tokens. Make masks before the first block, or leave them out for causal attention."
        )
    if dims > 2 and mask.shape[-3] == heads > 1:
        mask = mask[(slice(None),) * (dims - 3) + (mine,)]
    return mask


# In hand-written models


def sdpa(
    state: Any, function: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **more: Any
) -> Tensor:
    """Run torch's attention on the tokens of all ranks."""
    heads = query.shape[1]
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[None]  # of queries and keys, where transformers means padding

    def compute(mine: list[int], query: Tensor, key: Tensor, value: Tensor) -> Any:
        mask = _mask_of(state, attn_mask, mine, heads)
        if query.shape[1] == key.shape[1]:  # or one key head is broadcast
            more["enable_gqa"] = False
        return function(query, key, value, mask, *args, **more)

    return over_heads(state, "attention", ATTENTION, {"query": query, "key": key, "value": value}, compute)


def calls_attention(module: nn.Module) -> bool:
    """Whether a module of transformers in a module calls torch's attention itself, as those of Falcon do."""
    for part in module.modules():
        code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
        if code is not None and "scaled_dot_product_attention" in code.co_names:
            return True
    return False


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

    def run(state: Any, function: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def compute(_: list[int], query: Tensor, key: Tensor, value: Tensor) -> Any:
            return function(query, key, value, *args, **kwargs)

        return over_heads(state, "attention", ATTENTION, {"query": query, "key": key, "value": value}, compute)

    return ReplacedFunction(run, function)
