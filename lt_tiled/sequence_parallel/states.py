"""Layers that pass on a state from token to token, and causal convolutions, where ranks share a sequence.

Models call module-level functions for both. These are replaced in the module that the layer's code belongs to. In a
region, a rule over all tokens (a scan, a delta rule) runs on a part of the heads or channels, as attention does, and a
convolution gets the last tokens of the ranks before. Outside of a region they compute as before, and a block with
``keep`` saves what they compute.
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
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.attended import attended_alone, keeps_attention
from lt_tiled.modules.find import has_class, walk
from lt_tiled.modules.patch import Order, Patch
from lt_tiled.sequence_parallel.arguments import Call, unclear_tokens
from lt_tiled.sequence_parallel.attention import Replacement, replace
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.exchange import Part, Share, exchanged, over_heads
from lt_tiled.sequence_parallel.region import Region, current, entered


@dataclass(frozen=True)
class Rule:
    """A function over all tokens.

    The dimensions of an argument are ``b`` for the batch, ``s`` for tokens, ``h`` for heads or channels, ``g`` for
    groups of them and ``d`` for others.
    """

    dims: dict[str, str]
    """The dimensions of each argument, of which the first five are positional. The output has those with ``h``."""
    output: str
    """The argument whose dimensions the output has."""
    with_state: bool = False
    """Whether the function always returns its last state too."""


_DELTA = {"query": "bsgd", "key": "bsgd", "value": "bshd", "g": "bsh", "beta": "bsh"}
_SCAN = {"hidden_states": "bshd", "dt": "bsh", "A": "h", "B": "bsgd", "C": "bsgd"}
_SELECTIVE = {"hidden_states": "bhs", "dt": "bhs", "A": "hd", "B": "bds", "C": "bds"}
STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""The kinds of layers that mix tokens by functions below, as configurations of transformers name them."""
RULES = {
    "torch_chunk_gated_delta_rule": Rule(_DELTA, "value", with_state=True),
    "chunk_kimi_delta_attention": Rule({**_DELTA, "g": "bshd"}, "value", with_state=True),
    "mamba2_chunk_scan": Rule({**_SCAN, "D": "h", "dt_bias": "h", "z": "bshd"}, "hidden_states"),
    "mamba_selective_scan": Rule({**_SELECTIVE, "D": "h", "delta_bias": "h", "z": "bhs"}, "hidden_states"),
}
"""The functions that mix tokens by a state, by the names that they have in transformers."""
CONVOLUTION = "causal_conv1d_fn"
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Kernels of a whole layer: where they return ``None``, as without kernels, the layer calls the functions above."""

WHOLE = ("MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock")
"""Layers whose code passes on its state without such a function: each rank computes them for all tokens."""


class SharedFunction(Replacement):
    """A function in the module of a layer, which in a region mixes the tokens of all ranks."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        region = current()
        if region is None:
            return self._alone(args, kwargs) if keeps_attention() else self.function(*args, **kwargs)
        region.mixed.add(self.name)
        region.mixes_in = next(value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if self.name in FUSED:
            return None
        if isinstance(documents := kwargs.get("seq_idx"), Tensor) and documents.shape[-1] != region.total:
            if region.seq_idx is None:
                region.seq_idx = all_gather(documents, region.lengths, documents.dim() - 1, region.name)
            kwargs["seq_idx"] = region.seq_idx
        if self.name == CONVOLUTION:
            return convolved(region, self.function, *args, **kwargs)
        return scanned(region, self.function, RULES[self.name], args, kwargs)

    def _alone(self, args: Any, kwargs: Any) -> Any:
        """Run the function where no ranks share its tokens, and let the block keep its result as it keeps attention."""
        if self.name in FUSED:
            return None
        if self.name == CONVOLUTION:
            return self.function(*args, **kwargs)
        output = attended_alone(lambda *a, **k: _output(self.function(*a, **k)), *args, **kwargs)
        return (output, None) if RULES[self.name].with_state else output


def scanned(region: Region, function: Callable[..., Any], rule: Rule, args: Sequence[Any], kwargs: Any) -> Any:
    """Return what a function over all tokens returns for a rank's own, ``[B, S/n, H, D]`` in its dimensions."""
    arguments = dict(zip(rule.dims, args, strict=False)) | kwargs
    for name in ("initial_state", "initial_states"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{region.owner} begins with a state of earlier tokens, which each rank would take for its own: pass"
                " use_cache=False."
            )
    given = [name for name in rule.dims if isinstance(arguments.get(name), Tensor)]
    vectors = [name for name in given if "s" not in rule.dims[name]]
    tensors = [name for name in given if "s" in rule.dims[name]]
    by_heads = [name for name in tensors if "h" in rule.dims[name]]
    by_groups = [name for name in tensors if "h" not in rule.dims[name]]
    positional, others = list(rule.dims)[: len(args)], {n: v for n, v in kwargs.items() if n not in given}

    def compute(_: Share, queries: Sequence[Tensor], keys: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        own = dict(zip(vectors, parts, strict=True))
        for name, tensor in zip(by_heads + by_groups, [*queries, *keys], strict=True):
            own[name] = _as(rule.dims[name], tensor)
        found = function(*[own.pop(name) for name in positional], **others | own)
        return _by_heads(rule.dims[rule.output], _output(found))

    queries, keys = ([_by_heads(rule.dims[n], arguments[n]) for n in names] for names in (by_heads, by_groups))
    if (heads := queries[0].shape[1]) < region.size:
        raise ValueError(
            f"{region.owner} has {heads} heads or channels of a state, which {region.size} ranks cannot share: use"
            f" sequence_parallel={heads} or less."
        )
    output = over_heads(region, queries, keys, [arguments[n] for n in vectors], compute)
    output = _as(rule.dims[rule.output], output).contiguous()  # models may call view on it
    return (output, None) if rule.with_state else output


def _output(found: Any) -> Tensor:
    """Return what a rule computed, without the last state that some return beside it."""
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output


def _by_heads(dims: str, tensor: Tensor) -> Tensor:
    """Return a tensor with these dimensions as ``[B, H, S, D]``, without a copy."""
    for missing in set("hd") - set(dims.replace("g", "h")):
        tensor, dims = tensor.unsqueeze(-1), dims + missing
    dims = dims.replace("g", "h")
    return tensor.permute([dims.index(dim) for dim in "bhsd"])


def _as(dims: str, tensor: Tensor) -> Tensor:
    """Undo :func:`_by_heads`. The last dimension is contiguous, which kernels need."""
    dims = dims.replace("g", "h")
    full = dims + "".join(sorted(set("hd") - set(dims)))
    tensor = tensor.permute(["bhsd".index(dim) for dim in full])
    for _ in full[len(dims) :]:
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
    channels, count = x.shape[1], weight.shape[-1] - 1
    before = [Part(slice(0, channels), [slice(max(0, begin - count), begin)]) for begin in region.begins]
    halo = exchanged(region, [before], [x.unsqueeze(-1)], to_heads=True, keep=None)[0].squeeze(-1)
    count = halo.shape[-1]
    if kwargs.get("seq_idx") is not None:
        begin = region.begins[region.rank]
        kwargs["seq_idx"] = kwargs["seq_idx"][..., begin - count : begin + region.length].contiguous()
    return function(torch.cat([halo, x], -1), weight, *args, **kwargs)[..., count:]


class MixerPatch(Patch):
    """On a layer whose code calls such functions, or, with no names, which runs on all tokens."""

    order = Order.STATES

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.names = path, _names(module)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = current()
        if region is None:
            return self.inner(module, *args, **kwargs)
        if not self.names:
            return _on_all_tokens(self, region, Call(module, args, kwargs))
        for name, value in kwargs.items():
            padding = isinstance(value, Tensor) and value.dim() == 2 and value.shape[-1] == region.total
            if padding and "mask" in name and region.size > 1:
                kwargs[name] = region.local(value, -1)
        before, region.mixed = region.mixed, set()
        try:
            output = self.inner(module, *args, **kwargs)
            missing = sorted(self.names - region.mixed)
        finally:
            region.mixed = before
        if missing and region.size > 1:
            raise ValueError(
                f"{self.path} ({type(module).__name__}) mixes tokens and did not call {' and '.join(missing)}, where"
                " ranks exchange them: another kernel may take the place of the layer. Load the model without it"
                " (use_kernels=False), or set sequence_parallel=1."
            )
        return output


def _on_all_tokens(patch: MixerPatch, region: Region, call: Call) -> Any:
    if region.size == 1 or call.tokens is None:
        return call.run(patch.inner)
    if len(set(region.lengths)) > 1:  # then what a rank can tell another one may not
        for name, value in call.arguments.items():
            for leaf in pytree.tree_leaves(value):
                known = leaf is call.tokens or not isinstance(leaf, Tensor)
                if not known and sum(size in region.lengths for size in leaf.shape) > 1:
                    raise unclear_tokens(patch.path, name, leaf, region.length)
    region.check_recompute()
    region.exchanges += 1
    inform(
        f"{region.owner}: each rank computes {type(call.module).__name__} for all tokens, because its state cannot be"
        " divided by heads; the rest of the model is divided",
        once=f"all tokens {region.owner}",
    )

    whole = call.changed(patch.path, region.length, region.gathered(call.tokens), region.gathered)
    with entered(None):
        output = whole.run(patch.inner)
    first = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return pytree.tree_map(lambda leaf: region.local(leaf) if leaf is first else leaf, output)


def find_mixers(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the layers in these modules that mix tokens by a state or a convolution."""
    found = []
    for block_path, block in modules:
        for path, module in [(block_path, block), *walk(block, block_path)]:
            if _names(module) or has_class(module, WHOLE):
                found.append((path, module))
    return found


def _names(module: nn.Module) -> frozenset[str]:
    """Return the functions that a layer calls in a region, but for those that do all of it at once."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names) & {CONVOLUTION, *RULES}


def functions_of(model: nn.Module) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the contents of the files in which the layers of a model find such functions, and their names there."""
    return _tables(find_mixers([("", model)]))


def _tables(mixers: Sequence[tuple[str, nn.Module]]) -> list[tuple[dict[str, Any], list[str]]]:
    tables: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    for _, module in mixers:
        table = inspect.unwrap(type(module).forward).__globals__
        names = tables.setdefault(id(table), (table, {}))[1]
        names.update((name, None) for name in sorted(_names(module)) + list(FUSED) if name in table)
    return [(table, list(names)) for table, names in tables.values()]


def replace_functions(modules: Sequence[tuple[str, nn.Module]], undo: ExitStack) -> None:
    """Replace the functions that mix tokens by a state or a convolution in these modules, until ``undo`` is closed."""
    for table, names in _tables(find_mixers(modules)):
        for name in names:
            replace(table, name, partial(SharedFunction, name), undo)
