"""The blocks of a model: the innermost repeated modules that hold all that a layer computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from lt_tiled.modules.feed_forward import mixes_tokens, mlp_widths
from lt_tiled.modules.find import children_of, has_class, has_forward, outermost, walk, walk_all

BLOCK_CLASSES = ("GradientCheckpointingLayer", "TransformerEncoderLayer", "TransformerDecoderLayer")
"""The base class of Hugging Face's layers, and torch's own layers."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks: layers of a known class, and other repeated children of a ``ModuleList`` or ``Sequential``.

    A stage, which repeats layers itself (Swin, ConvNeXt), is no block, and its layers are. The parts of a layer that
    repeat, such as experts, heads or convolutions with their norms, are no blocks. If nothing repeats, a layer that is
    alone in a ``ModuleList`` is one (ALBERT).
    """
    known = outermost((path, m) for path, m in walk(model) if has_class(m, BLOCK_CLASSES))
    candidates = {m for _, m in known}
    layers = set(candidates)
    others: list[nn.Module] = []
    alone: list[tuple[str, nn.Module]] = []
    for path, container in walk_all(model):
        if isinstance(container, nn.ModuleList | nn.Sequential):
            # Bare projections, activations and lists are no candidates.
            composed = [(name, m) for name, m in children_of(container) if has_forward(m) and any(m.children())]
            count = Counter(type(m) for _, m in composed)
            repeated = {m for _, m in composed if count[type(m)] > 1}
            candidates |= repeated
            layers |= {m for m in repeated if _is_layer(m)}
            others += [m for _, m in composed if m not in repeated]
            if isinstance(container, nn.ModuleList) and len(container) == 1:
                alone += [(f"{path}.{name}".lstrip("."), m) for name, m in composed]
    # What contains layers is a stage, and one of its layers may be alone in another stage.
    kinds = {type(m) for m in layers if layers.isdisjoint(_below(m))}
    alike = {m for m in others if type(m) in kinds}
    candidates |= alike
    layers |= alike
    found = outermost((path, m) for path, m in walk(model) if m in candidates and layers.isdisjoint(_below(m)))
    return found or outermost(alone)


def _below(module: nn.Module) -> set[nn.Module]:
    return set(module.modules()) - {module}


def _is_layer(module: nn.Module) -> bool:
    """Whether a repeated module mixes tokens and has an MLP, which may be of 1 x 1 convolutions."""
    mixes = any(mixes_tokens(path.rpartition(".")[2], m) for path, m in walk(module))
    return mixes and mlp_widths(module) is not None


def shared_weights(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the weights that belong to two blocks, or to a block and the rest of the model, after their names."""
    inside = {part for _, block in blocks for part in block.modules()}
    rest = (weight for m in model.modules() if m not in inside for weight in m.parameters(recurse=False))
    owner: dict[nn.Parameter, str] = {}
    for path, weights in [*((p, b.parameters()) for p, b in blocks), (f"the rest of {type(model).__name__}", rest)]:
        for weight in weights:
            if owner.setdefault(weight, path) != path:
                yield owner[weight], path, weight
