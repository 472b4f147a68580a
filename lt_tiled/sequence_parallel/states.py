"""Layers that pass on a state from token to token, and causal convolutions, where ranks share a sequence.

Models call module-level functions for both, of which :data:`FUNCTIONS` is the table. They are replaced in the files of
the layers. In a shared pass, a rule over all tokens (a scan, a delta rule) runs on a part of the heads, as
attention does, and a convolution gathers the last tokens of the ranks before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.sequence_parallel.attention import SDPA, attend, mask_of_all, replace, sdpa
from lt_tiled.sequence_parallel.exchange import next_exchange, over_heads
from lt_tiled.sequence_parallel.groups import all_gather, name_of
from lt_tiled.sequence_parallel.ulysses import UlyssesState

DELTA = {"query": "key_heads", "key": "key_heads", "value": "heads", "g": "heads", "beta": "heads"}
SCAN = {"hidden_states": "heads", "dt": "heads", "A": "vector", "B": "key_heads", "C": "key_heads"}
SCAN |= {"D": "vector", "dt_bias": "vector", "z": "heads"}
"""The tensors of a rule, ``[B, S, H]`` or ``[B, S, H, D]``, and what their entries belong to."""


def _rule(kinds: dict[str, str], state: UlyssesState, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a rule over all tokens returns for a rank's own, ``[B, S/n, H, D]``."""
    # 1. Its tensors by name, with heads where attention has them. What it is given by position is not named alike.
    others = dict(zip(kinds, args, strict=False)) | kwargs
    tensors: dict[str, Tensor] = {}
    dims: dict[str, int] = {}
    for name, kind in kinds.items():
        if isinstance(others.get(name), Tensor):
            tensor = others.pop(name)
            dims[name] = tensor.dim()
            if kind != "vector":
                tensor = _by_heads(tensor)
            tensors[name] = tensor
    positional = list(kinds)[: len(args)]

    # 2. What a rank computes of all tokens. This may outlive the call, so it holds none of the rank's own tokens.
    def compute(_: list[int], **own: Any) -> Tensor:
        given = others | own
        for name, tensor in own.items():
            if kinds[name] != "vector":
                given[name] = _by_tokens(tensor, dims[name])
        found = function(*[given.pop(name) for name in positional], **given)
        if isinstance(found, tuple):
            found = found[0]
        return _by_heads(found)

    output = over_heads(state, "a rule", kinds, tensors, compute)
    output = _by_tokens(output, 4).contiguous()  # models may call view on it
    return (output, None) if kinds is DELTA else output  # delta rules return their last state too


def _by_heads(tensor: Tensor) -> Tensor:
    """Return a tensor ``[B, S, H, ...]`` as ``[B, H, S, D]``, without a copy."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(-1)
    return tensor.transpose(1, 2)


def _by_tokens(tensor: Tensor, dims: int) -> Tensor:
    """Return a tensor ``[B, H, S, D]`` as ``[B, S, H, ...]``. Kernels need its last dimension to be contiguous."""
    tensor = tensor.transpose(1, 2)
    if dims == 3:
        tensor = tensor.squeeze(-1)
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor


def _convolution(state: UlyssesState, function: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a causal convolution ``[B, C, S/n]`` of a rank's tokens and the last tokens of the ranks before."""
    next_exchange(state, "a convolution")
    # 1. The last tokens of each rank: as many as the kernel looks back, or all of them if there are fewer.
    back = weight.shape[-1] - 1
    each = min(back, state.length)
    last = all_gather(x.narrow(-1, state.length - each, each), name_of(state.group)).movedim(0, -2).flatten(-2)
    # 2. Those right before the rank's own.
    end = state.group.rank() * each
    halo = last[..., max(0, end - back) : end]
    count = halo.shape[-1]
    if kwargs.get("seq_idx") is not None:
        documents = state.part(kwargs["seq_idx"], -1, state.begin - count, state.length + count)
        kwargs["seq_idx"] = documents.contiguous()
    return function(torch.cat([halo, x], -1), weight, *args, **kwargs)[..., count:]


def _without_padding(state: UlyssesState, function: Callable[..., Tensor], hidden: Tensor, mask: Any) -> Tensor:
    """Take the rank's tokens of padding out of hidden states, by a mask ``[B, S]`` of all tokens."""
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == state.total:
        mask = state.own(mask)
    return function(hidden, mask)


_MASKS = ("causal", "sliding_window_causal", "chunked_causal", "recurrent_attention", "bidirectional")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"create_{kind}_mask": mask_of_all for kind in _MASKS},
    "eager_attention_forward": attend,
    "torch_chunk_gated_delta_rule": partial(_rule, DELTA),
    "chunk_kimi_delta_attention": partial(_rule, DELTA),
    "mamba2_chunk_scan": partial(_rule, SCAN),
    "causal_conv1d_fn": _convolution,
    "apply_mask_to_padding_states": _without_padding,
    # A kernel of a whole layer: where it returns None, as without kernels, the layer calls the functions above.
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
}
"""What runs in a shared pass in the place of functions of transformers."""


def replace_functions(modules: Iterable[nn.Module], undo: ExitStack) -> None:
    """Replace these functions in the files with the code of modules, until ``undo`` is closed."""
    tables: dict[int, dict[str, Any]] = {}
    for module in modules:
        for part in module.modules():
            table = getattr(inspect.unwrap(type(part).forward), "__globals__", {})
            tables[id(table)] = table
    for table in tables.values():
        if "mamba_selective_scan" in table:
            raise ValueError(
                "The state of Mamba 1 has no heads that ranks could share: use Mamba 2, or sequence_parallel=1 with"
                " activation_checkpointing='cpu'."
            )
        for name, function in list(table.items()):
            run = sdpa if function is SDPA else FUNCTIONS.get(name)  # imported from torch under any name
            if run is not None:
                replace(table, name, run, undo)
