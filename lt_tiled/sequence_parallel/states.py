"""Layers that pass on a state from token to token, and causal convolutions, where ranks share a sequence.

Models call module-level functions for both. These are replaced in the module that the layer's code belongs to. In a
region, a rule over all tokens (a scan, a delta rule) runs on a part of the heads, as attention does, and a
convolution gathers the last tokens of the ranks before. Outside of a region they compute as before.
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

from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Order, Patch
from lt_tiled.sequence_parallel.attention import Replacement, replace
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.exchange import Share, over_heads
from lt_tiled.sequence_parallel.region import Region, current


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
_OF_CHANNELS = "mamba_selective_scan"
"""The rule of Mamba 1, whose state has no heads."""


class SharedFunction(Replacement):
    """A function in the module of a layer, which in a region mixes the tokens of all ranks."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        region = current()
        if region is None:
            return self.function(*args, **kwargs)
        region.mixed.add(self.name)
        if self.name == FUSED:
            return None
        if isinstance(documents := kwargs.get("seq_idx"), Tensor) and documents.shape[-1] != region.total:
            if region.seq_idx is None:
                region.seq_idx = all_gather(documents, region.lengths, documents.dim() - 1, region.name)
            kwargs["seq_idx"] = region.seq_idx
        if self.name == CONVOLUTION:
            return convolved(region, self.function, *args, **kwargs)
        return scanned(region, self.function, RULES[self.name], args, kwargs)


def scanned(region: Region, function: Callable[..., Any], rule: Rule, args: Sequence[Any], kwargs: Any) -> Any:
    """Return what a function over all tokens returns for a rank's own, ``[B, S/n, H, D]`` in its dimensions."""
    arguments = dict(zip(rule.dims, args, strict=False)) | kwargs
    for name in ("initial_state", "initial_states"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{region.owner} begins with a state of earlier tokens, which each rank would take for its own: pass"
                " use_cache=False."
            )
    names: dict[str, list[str]] = {"heads": [], "groups": [], "vector": []}
    for name, belongs in rule.dims.items():
        if isinstance(arguments.get(name), Tensor):
            names[belongs].append(name)
    # The function below may outlive this call, so it holds none of the tensors of the rank's own tokens.
    dims = {name: arguments[name].dim() for name in names["heads"] + names["groups"]}
    others = {name: value for name, value in kwargs.items() if name not in dims and name not in names["vector"]}
    positional = list(rule.dims)[: len(args)]

    def compute(_: Share, queries: Sequence[Tensor], keys: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        own = others | dict(zip(names["vector"], parts, strict=True))
        for name, tensor in zip(dims, [*queries, *keys], strict=True):
            own[name] = _by_tokens(tensor, dims[name])
        found = function(*[own.pop(name) for name in positional], **own)
        return _by_heads(_output(found))

    queries = [_by_heads(arguments[name]) for name in names["heads"]]
    keys = [_by_heads(arguments[name]) for name in names["groups"]]
    output = over_heads(region, queries, keys, [arguments[name] for name in names["vector"]], compute)
    output = _by_tokens(output, 4).contiguous()  # models may call view on it
    return (output, None) if rule.with_state else output


def _output(found: Any) -> Tensor:
    """Return what a rule computed, without the last state that some return beside it."""
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output


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
    region: Region, function: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return a causal convolution ``[B, C, S/n]`` of a rank's tokens and the last tokens of the ranks before."""
    region.check_recompute()
    region.exchanges += 1
    if region.size == 1:
        return function(x, weight, *args, **kwargs)
    # The last tokens of each rank, or all of them if it has fewer than the kernel looks back.
    lengths = [min(weight.shape[-1] - 1, length) for length in region.lengths]
    mine, end = lengths[region.rank], sum(lengths[: region.rank])
    last = all_gather(x.narrow(-1, region.length - mine, mine), lengths, x.dim() - 1, region.name)
    halo = last[..., max(0, end - weight.shape[-1] + 1) : end]
    count = halo.shape[-1]
    if kwargs.get("seq_idx") is not None:
        begin = region.begins[region.rank]
        kwargs["seq_idx"] = kwargs["seq_idx"][..., begin - count : begin + region.length].contiguous()
    return function(torch.cat([halo, x], -1), weight, *args, **kwargs)[..., count:]


class MixerPatch(Patch):
    """On a layer whose code calls such functions."""

    order = Order.STATES

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.names = path, _names(module)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = current()
        if region is None:
            return self.inner(module, *args, **kwargs)
        for name, value in kwargs.items():
            padding = isinstance(value, Tensor) and value.dim() == 2 and value.shape[-1] == region.total
            if padding and "mask" in name:
                kwargs[name] = region.local(value, -1)
        before, region.mixed = region.mixed, set()
        try:
            output = self.inner(module, *args, **kwargs)
            missing = sorted(self.names - region.mixed)
        finally:
            region.mixed = before
        if missing:
            raise ValueError(
                f"{self.path} ({type(module).__name__}) mixes tokens and did not call {' and '.join(missing)}, where"
                " ranks exchange them: another kernel may take the place of the layer. Load the model without it"
                " (use_kernels=False), or set sequence_parallel=1."
            )
        return output


def find_mixers(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the layers in these modules that mix tokens by a state or a convolution."""
    found = []
    for block_path, block in modules:
        for path, module in [(block_path, block), *walk(block, block_path)]:
            if _names(module):
                found.append((path, module))
    return found


def _names(module: nn.Module) -> frozenset[str]:
    """Return the functions that a layer calls in a region, unless it calls one that cannot be shared too."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = frozenset() if code is None else frozenset(code.co_names)
    return frozenset() if _OF_CHANNELS in names else names & {CONVOLUTION, *RULES}


def replace_functions(modules: Sequence[tuple[str, nn.Module]], undo: ExitStack) -> None:
    """Replace the functions that mix tokens by a state or a convolution in these modules, until ``undo`` is closed."""
    replaced = set[tuple[int, str]]()
    for _, module in find_mixers(modules):
        table = inspect.unwrap(type(module).forward).__globals__
        for name in [*sorted(_names(module)), FUSED]:
            if name in table and (id(table), name) not in replaced:
                replaced.add((id(table), name))
                replace(table, name, partial(SharedFunction, name), undo)
