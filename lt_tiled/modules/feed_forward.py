"""What a block's MLP is, and which norms stand next to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from lt_tiled.modules.find import has_forward, unwrapped, walk, walk_all


@dataclass(frozen=True)
class Tileable:
    """A module, or a method of it, to tile."""

    path: str
    """The module's path; of a method with the method's name."""
    module: nn.Module
    kind: str
    """The class, or ``Class.method``."""
    method: str = "forward"
    parts: tuple[str, ...] | None = None
    """The children that a method uses; ``None`` for the whole module."""
    parent: nn.Module | None = None
    """The module whose forward calls this one and the norms next to it."""
    before: tuple[nn.Module, ...] = ()
    """Norms whose output goes into this module."""
    after: tuple[nn.Module, ...] = ()
    """Norms that take this module's output, or projections if it is a norm itself."""
    named: bool = False
    """Whether the policy names it."""
    norm_of: int | None = None
    """Of a norm that the policy does not name: the hidden size of its block."""

    @classmethod
    def of_module(cls, path: str, module: nn.Module, **fields: Any) -> Tileable:
        return cls(path, module, type(module).__name__, **fields)

    @classmethod
    def of_method(cls, path: str, module: nn.Module, method: str, **fields: Any) -> Tileable:
        return cls(f"{path}.{method}".lstrip("."), module, f"{type(module).__name__}.{method}", method, **fields)

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.kind if self.path == self.kind else f"{self.path} ({self.kind})"


def find_feed_forwards(root: nn.Module, path: str, top: bool = False) -> Iterator[Tileable]:
    """Yield the MLPs in a block, with the norms next to them; ``top`` for a model without blocks."""
    before, after = ((), ()) if top else _norms_next_to_mlp(root)
    method = next((name for name in _METHODS if callable(getattr(type(root), name, None))), None)
    if method is not None:
        apart = method != "feed_forward_chunk"  # the others leave the norms to the block
        parts = tuple(n for n, m in unwrapped_children(root) if not (mixes_tokens(n, m) or (apart and is_norm(m))))
        if _widths(root.get_submodule(n) for n in parts) is not None:
            yield Tileable.of_method(path, root, method, parts=parts, parent=root, before=before)
            return
    for name, child in unwrapped_children(root):
        below = f"{path}.{name}" if path else name
        if mixes_tokens(name, child):
            continue
        inside = list(walk(child))
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not container and _widens(child) and not any(mixes_tokens(p.rpartition(".")[2], m) for p, m in inside):
            parent = root if before or after else None
            yield Tileable.of_module(below, child, parent=parent, before=before, after=after)
        else:
            yield from find_feed_forwards(child, below)


_METHODS = ("_ff_block", "feed_forward_chunk", "ff_chunk")
"""Methods that are a block's MLP: those of ``nn.TransformerEncoderLayer`` and its decoder, of BERT-like layers, and of
ALBERT and Longformer.
"""


def unwrapped_children(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children with their names; those that are compiled or FSDP units without the wrapper."""
    return [(name, unwrapped(child)) for name, child in root.named_children()]


_PRE = re.compile(r"pre.*(feed|ffw?|mlp)|(^|_)(ffn?|mlp|feed_?forward)_(layer)?norm|ln_mlp", re.IGNORECASE)
_SECOND = re.compile(r"post_attention|(norm|ln)_?[23]$|layernorm_after|final_layer_norm", re.IGNORECASE)
POST = re.compile(r"post.*(feed|ffw?|mlp)", re.IGNORECASE)


def _norms_next_to_mlp(block: nn.Module) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return the norms whose names say that they stand before the block's MLP, and those after it.

    A guess that only costs a recompute of the norm where it is wrong: what the block does with an output decides.
    """
    children = unwrapped_children(block)
    norms = [(name, m) for name, m in children if is_norm(m)]
    after = tuple(m for name, m in norms if POST.search(name))
    before = tuple(m for name, m in norms if _PRE.search(name) and not POST.search(name))
    if not before and len(norms) > len(after) + 1 and getattr(block, "norm_first", True):
        before = tuple(m for name, m in norms if _SECOND.search(name) and m not in after)[-1:]
    # A LayerScale's gradient reads the MLP's output, as that of a norm does. The first one stands after attention.
    return before, after + tuple(m for _, m in children if "LayerScale" in type(m).__name__)[-1:]


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm over the last dimension; not a batch or instance norm."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, _NormBase | nn.GroupNorm)


def is_one_kernel(norm: nn.Module) -> bool:
    """Whether a norm holds no more than its output."""
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm)


def parts_below(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of a mixture's experts, routed and shared: what can be tiled without the router."""
    children = unwrapped_children(module)
    if not any(name == "experts" for name, _ in children):
        return ()
    routed = [name for name, m in children if name == "experts" and has_forward(m)]
    lists = [f"{name}.{n}" for name, c in children if isinstance(c, nn.ModuleList) for n, _ in unwrapped_children(c)]
    others = [(name, m) for name, m in children if name != "experts" and not isinstance(m, nn.ModuleList)]
    return (*routed, *lists, *(name for name, m in others if _widens(m)))


def cannot_be_tiled(part: nn.Module) -> str | None:
    """Return why a module cannot run in tiles although a few tokens may not show it."""
    if isinstance(part, torch.jit.ScriptModule):
        return "whose compiled code computes with its own weights"
    if any(weight is not None and is_lazy(weight) for weight in part._parameters.values()):
        return "whose weights have no shape before its first call"
    if isinstance(part, _BatchNorm):
        return "whose statistics in training depend on all tokens"
    # Switch Transformers' expert_capacity: a router sends its experts a limited number of tokens.
    if any("capacity" in name and isinstance(value, int | float) for name, value in vars(part).items()):
        return "whose experts have a capacity, so that the result of a token depends on all tokens"
    if any(kind in type(part).__name__ for kind in ("DropPath", "StochasticDepth")):  # draw once for each sample
        return "which drops whole samples and would drop tiles"
    return None


def mixes_tokens(name: str, module: nn.Module) -> bool:
    """Whether the module is known to look across tokens: attention, convolutions, recurrences, batch norms, shifts."""
    shifts = nn.ConstantPad1d | nn.ConstantPad2d  # RWKV's
    if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase | shifts) or cannot_be_tiled(module) is not None:
        return True
    label = f"{name} {type(module).__name__}".lower()
    # A layer with attention, such as Zamba 2's AttentionDecoderLayer, also has an MLP.
    return ("attn" in label or "attention" in label) and not label.endswith("coderlayer")


def _widens(module: nn.Module) -> bool:
    """Whether projections lead to a larger size and back, or to experts whose projections do."""
    return any(name == "experts" for name, _ in module.named_children()) or _widths([module]) is not None


@dataclass(frozen=True)
class MLPSizes:
    """The sizes of an MLP, a mixture of experts or a norm, from which the size of its tiles follows."""

    hidden: int
    """``hidden_size``."""
    intermediate: int
    """``intermediate_size``: of a mixture, that of a gated MLP with as many weights as a token uses; of a norm,
    ``hidden_size``.
    """
    summed: int
    """The elements of the weights whose gradients each tile sums: those of all experts, because the tokens of a tile
    use all; 0 if all are frozen."""
    used: int
    """The elements of the weights that one token uses: of a mixture, those of its ``top_k`` experts, and what all
    tokens share."""

    @classmethod
    def dense(cls, hidden: int, intermediate: int) -> MLPSizes:
        """Return the sizes of an MLP of which each token uses all, with three weights as a gated one has."""
        weights = 3 * hidden * intermediate
        return cls(hidden, intermediate, summed=weights, used=weights)

    @property
    def is_mixture(self) -> bool:
        """Whether a tile sums the gradients of more weights than a token uses."""
        return self.summed > self.used


def find_sizes(*modules: nn.Module) -> MLPSizes | None:
    """Return the sizes of a mixture of experts or an MLP, or ``None`` where its weights do not show them."""
    weights = [pair for module in modules for pair in _weights(module)]
    matrices = [shape[-2:] for shape, experts in weights if experts > 1 and len(shape) > 1]
    top_k = _top_k(modules)
    if not matrices or top_k is None:
        widths = _widths(modules)
        return None if widths is None else MLPSizes.dense(*widths)
    # The first matrix leads to intermediate_size, mostly with gate and up in one, and the last one back. hidden_size is
    # the last dimension of the first, unless the model keeps matrices the other way around (GPT-OSS, Llama 4).
    first, last = matrices[0], matrices[-1]
    hidden = first[-1] if first[-1] in last else first[-2]
    used = sum(prod(shape) * min(top_k, experts) // experts for shape, experts in weights)
    is_trained = any(weight.requires_grad for module in modules for weight in module.parameters())
    summed = sum(prod(shape) for shape, _ in weights) if is_trained else 0
    return MLPSizes(hidden, max(1, used // (3 * hidden)), summed, used)


def _weights(module: nn.Module, experts: int = 1) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the shape of each weight, with the number of experts that it is of, or that its list has; else 1."""
    for weight in module._parameters.values():
        if weight is not None:
            shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3 leaves an empty tensor in its place
            yield shape, shape[0] if len(shape) == 3 else experts
    for name, child in unwrapped_children(module):
        several = name == "experts" and isinstance(child, nn.ModuleList)
        yield from _weights(child, len(child) if several else experts)  # type: ignore[arg-type]


_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""The names of the number of experts that a token uses; in modules also ``top_k``, which is another one in configs."""


def _top_k(modules: Sequence[nn.Module]) -> int | None:
    """Return the number of experts that a token uses, from the mixture, its router or their config."""
    for part in (part for module in modules for _, part in walk_all(module)):
        for source, names in ((part, ("top_k", *_TOP_K)), (getattr(part, "config", None), _TOP_K)):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return None


def _widths(modules: Iterable[nn.Module]) -> tuple[int, int] | None:
    """Return ``(hidden_size, intermediate_size)`` of an MLP, or ``None`` where its projections do not show them."""
    return widths_of([w for module in modules for p in projections(module) if (w := projection_sizes(p)) is not None])


def widths_of(sizes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return ``(hidden_size, intermediate_size)`` of projections of these sizes, if they lead from one to the other."""
    pairs = ((hidden, inner) for inner, hidden in sizes if inner > hidden)
    # A projection of twice the size is gate and up in one.
    return next((p for p in pairs if p in sizes or (p[0], 2 * p[1]) in sizes), None)


def projections(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the projections in a module; an adapted one (LoRA) counts as the one that it adapts."""
    if projection_sizes(module) is not None:
        yield module
    else:
        for _, child in unwrapped_children(module):
            yield from projections(child)


def projection_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a projection: ``nn.Linear``, JetMoE's experts, Hugging Face's ``Conv1D``."""
    for names in (("in_features", "out_features"), ("input_size", "output_size"), ("nx", "nf")):
        first, second = (getattr(module, name, None) for name in names)
        if isinstance(first, int) and isinstance(second, int):
            return first, second
    return None
