"""Where attention is found: in the attention interface of transformers, and in calls of torch's function.

Nothing here has an effect outside of a region.
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

from lt_tiled.sequence_parallel.exchange import attend
from lt_tiled.sequence_parallel.region import Region, current


class Replacement:
    """A function that takes the place of another one in a table, or in a module, while it has users."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Shared(Replacement):
    """An attention function in transformers' table, which attends to the tokens of all ranks in a region."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        region = current()
        if region is None:
            return self.function(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("position_bias") is not None:
            raise ValueError(
                f"{region.owner} adds a position bias to attention, which sequence parallelism cannot cut: use a model"
                " with other positions, or sequence_parallel=1."
            )
        mask = region.mask if region.own_mask else attention_mask
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = region.position_ids
        heads, sinks = query.shape[1], kwargs.get("s_aux")
        if sinks is not None and len(sinks) != heads:  # one logit for each head
            raise ValueError(f"{region.owner} has attention sinks, which head tiles do not cut: set head_tiles=1.")

        def attention(q: Tensor, k: Tensor, v: Tensor, mine: slice, *own_sinks: Tensor) -> Tensor:
            part, options = _Grouped(module, q.shape[1] // k.shape[1]), kwargs
            if own_sinks:
                part.__dict__["sinks"] = own_sinks[0]  # where eager attention finds them
                options = kwargs | {"s_aux": own_sinks[0]}
            if region.documents is None or mask is not None:
                own: Tensor = self.function(part, q, k, v, _mask_of(region, mask, mine, heads), *args, **options)[0]
                return own.transpose(1, 2)
            outputs = []
            for document in zip(*(t.split(region.documents, 2) for t in (q, k, v)), strict=True):
                outputs.append(self.function(part, *document, None, *args, **options)[0])
            return torch.cat(outputs, 1).transpose(1, 2)

        vectors = [] if sinks is None else [sinks]
        return attend(region, query, key, value, attention, vectors).transpose(1, 2).contiguous(), None


class _Grouped:
    """An attention module as its function sees it, with the number of query heads for each key-value head here."""

    def __init__(self, module: Any, groups: int) -> None:
        self.__dict__.update(_module=module, num_key_value_groups=groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_EAGER = "eager_attention_forward"
"""The function of a model's file that is not in the table, because each has its own."""


def eager_files(module: nn.Module) -> list[dict[str, Any]]:
    """Return the contents of the files of transformers whose eager attention a module may call."""
    files = dict.fromkeys(sys.modules.get(type(part).__module__) for part in module.modules())
    return [vars(file) for file in files if hasattr(file, _EAGER)]


def share_interface(modules: Sequence[nn.Module], undo: ExitStack) -> None:
    """Wrap the attention functions of transformers, and eager attention in the files of these modules.

    The last one of several users restores them when its ``undo`` is closed.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    for name in list(TABLE):
        replace(TABLE, name, _Shared, undo)
    for file in {id(file): file for module in modules for file in eager_files(module)}.values():
        replace(file, _EAGER, _Shared, undo)


def replace(table: Any, name: str, kind: Callable[[Any], Replacement], undo: ExitStack) -> None:
    """Replace a function of a table until ``undo`` is closed, by the last one of several users."""
    function = table[name]
    shared = function if isinstance(function, Replacement) else kind(function)
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


class AttentionMode(TorchFunctionMode):
    """Lets ``F.scaled_dot_product_attention`` attend to the tokens of all ranks in a region."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        region, kwargs = current(), kwargs or {}
        if region is None:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise ValueError(
                f"{region.owner} uses nn.MultiheadAttention, whose projections and attention are one function. With"
                " sequence parallelism call F.scaled_dot_product_attention in its place."
            )
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = _SDPA.bind(*args, **kwargs).arguments
        query, key, value, mask = (call.pop(name, None) for name in ("query", "key", "value", "attn_mask"))
        heads = query.shape[1]

        def attention(q: Tensor, k: Tensor, v: Tensor, mine: slice) -> Tensor:
            own = _mask_of(region, mask, mine, heads)
            grouped = (
                call.get("enable_gqa", False) and q.shape[1] != k.shape[1]
            )  # one key head may be broadcast instead
            out: Tensor = func(q, k, v, own, **call | {"enable_gqa": grouped})
            return out

        return attend(region, query, key, value, attention)


def calls_attention(module: nn.Module) -> bool:
    """Whether a module of transformers in a module calls torch's attention itself, as those of Falcon do."""
    codes = [getattr(inspect.unwrap(type(part).forward), "__code__", None) for part in module.modules()]
    return any(code is not None and "scaled_dot_product_attention" in code.co_names for code in codes)


def shared_attention(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention function that attends to the tokens of all ranks where they share a sequence.

    For functions other than ``F.scaled_dot_product_attention``, such as ``flex_attention`` or a compiled one, in
    hand-written models: ``attention = shared_attention(flex_attention)``.

    Args:
        function: Takes queries ``[B, H, S, D]``, keys and values ``[B, K, S, D]``, and other arguments, which it gets
            as they are: masks are those of all tokens, and of every head alike. Where ranks share a sequence it is
            called with a part of the heads.

    Returns:
        The function with the same arguments.
    """

    @wraps(function)
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        region = current()
        if region is None:
            return function(query, key, value, *args, **kwargs)
        return attend(region, query, key, value, lambda q, k, v, _: function(q, k, v, *args, **kwargs))

    return attention


def _mask_of(region: Region, mask: Any, mine: slice, heads: int) -> Any:
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


_SDPA = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)
"""The arguments of ``F.scaled_dot_product_attention``, a builtin that tells no signature."""
