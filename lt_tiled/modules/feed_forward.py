"""What a block's MLP is, which norms stand next to it, and its sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from lt_tiled.modules.find import children_of, full_shape, unwrapped, walk

_METHODS = ("_ff_block", "feed_forward_chunk", "ff_chunk")
"""Methods that are a block's MLP: those of torch's layers, of BERT-like layers, and of ALBERT and Longformer."""
_SIZES = {"in_features": "out_features", "nx": "nf", "input_size": "output_size"}
"""Where a projection has its sizes: ``nn.Linear``, ``Conv1D`` of transformers, JetMoE's experts."""
ONE_KERNEL = nn.LayerNorm | nn.RMSNorm
"""Norms that hold no more than their output."""
_AFTER = re.compile(r"post.*(feed|ffw?|mlp|self_attn)", re.IGNORECASE)
"""The names of norms that take an output of the block's parts, and not the residual stream."""


@dataclass(frozen=True)
class Tileable:
    """A module, or a method of it, to tile.

    Attributes:
        path: The module's path, of a method with the method's name; empty for what is tiled by itself.
        parts: The children that a method uses; ``None`` for the whole module.
        parent: The module whose forward calls this one and the norms next to it.
        before: Norms whose output goes into this module.
        after: Norms that take this module's output, or projections if it is a norm itself.
        named: Whether the policy names it.
        norm_of: Of a norm that the policy does not name: the hidden size of its model.
    """

    path: str
    module: nn.Module
    method: str = "forward"
    parts: tuple[str, ...] | None = None
    parent: nn.Module | None = None
    before: Sequence[nn.Module] = ()
    after: Sequence[nn.Module] = ()
    named: bool = False
    norm_of: int | None = None


def find_feed_forwards(block: nn.Module, path: str) -> Iterator[Tileable]:
    """Yield the MLPs in a block, with the norms next to them."""
    stream, after = norms_of(block)
    before = stream[1:][-1:]
    children = [(name, child) for name, child in children_of(block) if not mixes_tokens(name, child)]
    for method in _METHODS:
        if callable(getattr(type(block), method, None)):
            parts: dict[str, nn.Module] = {}
            for name, child in children:
                # ESM has its norm in the method. The others run the block's norms before or after it.
                if method == "feed_forward_chunk" or not is_norm(child):
                    parts[name] = child
            if mlp_widths(*parts.values()) is not None:
                yield Tileable(f"{path}.{method}".lstrip("."), block, method, tuple(parts), block, before)
                return
    for name, child in children:
        below = f"{path}.{name}".lstrip(".")
        if is_mlp(child):
            parent = block if before or after else None
            yield Tileable(below, child, parent=parent, before=before, after=after)
        else:
            yield from find_feed_forwards(child, below)


def is_mlp(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts, or projections in it lead to a larger size and back."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or has_mixer(module):
        return False
    return "experts" in module._modules or mlp_widths(module) is not None


def parts_below(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a mixture's experts, routed and shared, with their paths: what can be tiled without the router."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in children_of(module) if "experts" in module._modules else ():
        if isinstance(child, nn.ModuleList):
            found += [(f"{name}.{number}", unwrapped(expert)) for number, expert in enumerate(child)]
        elif name == "experts" or is_mlp(child):
            found.append((name, child))
    return found


def mixes_tokens(name: str, module: nn.Module) -> bool:
    """Whether the module is known to look across tokens: attention, convolutions, recurrences, batch norms, shifts."""
    shifts = nn.ConstantPad1d | nn.ConstantPad2d  # RWKV's
    if isinstance(module, _ConvNd | nn.RNNBase | _NormBase | shifts) or has_capacity(module):
        return True
    label = f"{name} {type(module).__name__}".lower()
    # A layer with attention, such as Zamba 2's AttentionDecoderLayer, also has an MLP.
    return ("attn" in label or "attention" in label) and not label.endswith("coderlayer")


def has_mixer(module: nn.Module) -> bool:
    """Whether something inside of a module mixes tokens."""
    return any(mixes_tokens(path.rpartition(".")[2], part) for path, part in walk(module))


def has_capacity(part: nn.Module) -> bool:
    """Whether a router sends its experts a limited number of tokens (Switch Transformers), which few do not show."""
    return any("capacity" in name and isinstance(value, int | float) for name, value in vars(part).items())


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm over the last dimension; not a batch or instance norm."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, _NormBase | nn.GroupNorm)


def norms_of(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the norms of the residual stream, of which the last one of several stands before the MLP, and the others.

    The others take the output of attention or the MLP. A guess that only costs a recompute of the norm where it is
    wrong: what the block does with an output decides.
    """
    stream: list[nn.Module] = []
    others: list[nn.Module] = []
    scales: list[nn.Module] = []
    for name, child in children_of(block):
        if "LayerScale" in type(child).__name__:
            scales.append(child)
        elif is_norm(child):
            (others if _AFTER.search(name) else stream).append(child)
    # The gradient of a scale reads the MLP's output, as that of a norm does. The first scale stands after attention.
    return stream, others + scales[-1:]


@dataclass(frozen=True)
class MLPSizes:
    """The sizes of an MLP, a mixture of experts or a norm, from which the size of its tiles follows.

    Attributes:
        summed: The elements of the weights whose gradients a tile sums: those of all experts.
        used: The elements of the weights that a token uses: those of its ``top_k`` experts, and what all tokens share.
        hidden: ``hidden_size``, of the model where a norm of each head has a smaller one; 0 if it is that of the input.
    """

    summed: int
    used: int
    hidden: int = 0

    @classmethod
    def dense(cls, hidden: int, intermediate: int) -> MLPSizes:
        """Return the sizes of an MLP of which each token uses all, with three weights as a gated one has."""
        weights = 3 * hidden * intermediate
        return cls(weights, weights, hidden)


def find_sizes(*modules: nn.Module) -> MLPSizes | None:
    """Return the sizes of a mixture of experts or an MLP, or ``None`` where its weights do not show them."""
    most = top_k = summed = used = 0
    for module in modules:
        for _, part in walk(module):
            config = getattr(part, "config", None)  # its own top_k is another one
            for number in (getattr(part, "top_k", None), getattr(config, "num_experts_per_tok", None)):
                if isinstance(number, int):
                    top_k = top_k or number
    for module in modules:
        for weight, experts in _weights(module):
            elements = prod(full_shape(weight))
            most = max(most, experts)
            summed += elements * weight.requires_grad
            used += elements * min(top_k, experts) // experts
    if most > 1 and top_k:
        return MLPSizes(summed, used)
    widths = mlp_widths(*modules)
    return None if widths is None else MLPSizes.dense(*widths)


def _weights(module: nn.Module, experts: int = 1) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each weight, with the number of experts that it is of, or that are in its list; else 1."""
    for weight in module._parameters.values():
        if weight is not None:
            shape = full_shape(weight)
            yield weight, shape[0] if len(shape) == 3 else experts
    for name, child in children_of(module):
        count = experts
        if name == "experts" and isinstance(child, nn.ModuleList):
            count = len(child)
        yield from _weights(child, count)


def mlp_widths(*modules: nn.Module) -> tuple[int, int] | None:
    """Return ``(hidden_size, intermediate_size)``, if projections lead from one to the other and back."""
    sizes: set[tuple[int, int]] = set()
    for module in modules:
        for _, inputs, outputs in projections(module):
            sizes.add((inputs, outputs))
    for inner, hidden in sizes:
        # A projection to twice the size is gate and up in one.
        if inner > hidden and ((hidden, inner) in sizes or (hidden, 2 * inner) in sizes):
            return hidden, inner
    return None


def projections(module: nn.Module) -> Iterator[tuple[nn.Module, int, int]]:
    """Yield the projections in a module with input and output size; an adapted one (LoRA) as the one that it adapts."""
    for first, second in _SIZES.items():
        inputs = getattr(module, first, None)
        outputs = getattr(module, second, None)
        if isinstance(inputs, int) and isinstance(outputs, int):
            yield module, inputs, outputs
            return
    for _, child in children_of(module):
        yield from projections(child)
