"""Layers that pass on a state from token to token, and causal convolutions, where ranks share a sequence.

Models call module-level functions for both. These are replaced in the module that the layer's code belongs to. In a
shared pass, a rule over all tokens (a scan, a delta rule) runs on a part of the heads, as attention does, and a
convolution gathers the last tokens of the ranks before. Outside of a shared pass they compute as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.sequence_parallel.attention import replace
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.exchange import HeadShard, begin_exchange, over_heads
from lt_tiled.sequence_parallel.ulysses import UlyssesState, current


@dataclass(frozen=True)
class Rule:
    """A function over all tokens, of which a rank computes some heads."""

    dims: dict[str, str]
    """What the entries of each argument belong to: ``"heads"`` ``[B, S, H, ...]``, ``"groups"`` of heads
    ``[B, S, G, D]``, or a ``"vector"`` of heads without tokens, ``[H]``. The first five are positional."""
    with_state: bool = False
    """Whether the function always returns its last state too."""


_DELTA = {"query": "groups", "key": "groups", "value": "heads", "g": "heads", "beta": "heads"}
_SCAN = {"hidden_states": "heads", "dt": "heads", "A": "vector", "B": "groups", "C": "groups"}
_SCAN |= {"D": "vector", "dt_bias": "vector", "z": "heads"}
STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""The kinds of layers that mix tokens by functions below, as configurations of transformers name them."""
RULES = {
    "torch_chunk_gated_delta_rule": Rule(_DELTA, with_state=True),
    "chunk_kimi_delta_attention": Rule(_DELTA, with_state=True),
    "mamba2_chunk_scan": Rule(_SCAN),
}
"""The functions that mix tokens by a state, by the names that they have in transformers."""
CONVOLUTION = "causal_conv1d_fn"
FUSED = "mamba2_split_conv1d_scan_combined"
"""A kernel of a whole layer: where it returns ``None``, as without kernels, the layer calls the functions above."""
PADDING = "apply_mask_to_padding_states"
"""Takes the tokens of padding out of hidden states, by a mask ``[B, S]``."""
_OF_CHANNELS = "mamba_selective_scan"
"""The rule of Mamba 1, whose state has no heads."""


def _mixed(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function of a layer, which in a shared pass mixes the tokens of all ranks."""
    state = current()
    if state is None:
        return function(*args, **kwargs)
    if name == FUSED:
        return None
    if name == PADDING:
        hidden, mask = args
        is_whole = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == state.total
        return function(hidden, state.own(mask) if is_whole else mask, **kwargs)
    if name == CONVOLUTION:
        return convolved(state, function, *args, **kwargs)
    return scanned(state, name, function, args, kwargs)


def scanned(state: UlyssesState, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Return what a function over all tokens returns for a rank's own, ``[B, S/n, H, D]`` in its dimensions."""
    rule = RULES[name]
    arguments = dict(zip(rule.dims, args, strict=False)) | kwargs
    names: dict[str, list[str]] = {"heads": [], "groups": [], "vector": []}
    for argument, belongs in rule.dims.items():
        if isinstance(arguments.get(argument), Tensor):
            names[belongs].append(argument)
    # The function below may outlive this call, so it holds none of the tensors of the rank's own tokens.
    dims = {argument: arguments[argument].dim() for argument in names["heads"] + names["groups"]}
    others = {key: value for key, value in kwargs.items() if key not in dims and key not in names["vector"]}
    positional = list(rule.dims)[: len(args)]

    def compute(_: HeadShard, queries: Sequence[Tensor], keys: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        own = others | dict(zip(names["vector"], parts, strict=True))
        for argument, tensor in zip(dims, [*queries, *keys], strict=True):
            own[argument] = _by_tokens(tensor, dims[argument])
        found = function(*[own.pop(argument) for argument in positional], **own)
        return _by_heads(found[0] if isinstance(found, tuple) else found)

    queries = [_by_heads(arguments[argument]) for argument in names["heads"]]
    keys = [_by_heads(arguments[argument]) for argument in names["groups"]]
    vectors = [arguments[argument] for argument in names["vector"]]
    output = over_heads(state, name, queries, keys, vectors, compute)
    output = _by_tokens(output, 4).contiguous()  # models may call view on it
    return (output, None) if rule.with_state else output


def _by_heads(tensor: Tensor) -> Tensor:
    """Return a tensor ``[B, S, H, ...]`` as ``[B, H, S, D]``, without a copy."""
    return (tensor if tensor.dim() == 4 else tensor.unsqueeze(-1)).transpose(1, 2)


def _by_tokens(tensor: Tensor, dims: int) -> Tensor:
    """Return a tensor ``[B, H, S, D]`` as ``[B, S, H, ...]``. Kernels need its last dimension to be contiguous."""
    tensor = tensor.transpose(1, 2)
    if dims == 3:
        tensor = tensor.squeeze(-1)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def convolved(
    state: UlyssesState, function: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return a causal convolution ``[B, C, S/n]`` of a rank's tokens and the last tokens of the ranks before."""
    begin_exchange(state, CONVOLUTION, x)
    # 1. The last tokens of each rank: as many as the kernel looks back, or all of them if there are fewer.
    back = weight.shape[-1] - 1
    each = min(back, state.length)
    last = all_gather(x.narrow(-1, state.length - each, each), state.name).movedim(0, -2).flatten(-2)
    # 2. Those right before the rank's own.
    end = state.rank * each
    halo = last[..., max(0, end - back) : end]
    count = halo.shape[-1]
    if kwargs.get("seq_idx") is not None:
        documents = state.padded(kwargs["seq_idx"], -1)
        kwargs["seq_idx"] = documents[..., state.begin - count : state.begin + state.length].contiguous()
    return function(torch.cat([halo, x], -1), weight, *args, **kwargs)[..., count:]


def _names(module: nn.Module) -> frozenset[str]:
    """Return the functions that a layer calls in a shared pass, unless it calls one that cannot be shared too."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = frozenset() if code is None else frozenset(code.co_names)
    return frozenset() if _OF_CHANNELS in names else names & {CONVOLUTION, *RULES}


def replace_functions(blocks: Sequence[tuple[str, nn.Module]], undo: ExitStack) -> None:
    """Replace the functions that mix tokens by a state or a convolution in blocks, until ``undo`` is closed."""
    replaced = set[tuple[int, str]]()
    for module in dict.fromkeys(part for _, block in blocks for part in block.modules()):
        names = _names(module)
        if not names:
            continue
        table = inspect.unwrap(type(module).forward).__globals__
        for name in [*sorted(names), PADDING, FUSED]:
            if name in table and (id(table), name) not in replaced:
                replaced.add((id(table), name))
                replace(table, name, partial(_mixed, name), undo)
