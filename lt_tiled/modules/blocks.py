"""The blocks of a model: the innermost repeated modules that hold all that a layer computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from lt_tiled.modules.feed_forward import has_mixer, mlp_widths
from lt_tiled.modules.find import children_of, has_class, has_forward, outermost, walk, walk_all

BLOCK_CLASSES = ("GradientCheckpointingLayer", "TransformerEncoderLayer", "TransformerDecoderLayer")
"""The base class of Hugging Face's layers, and torch's own layers."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks: layers of a known class, and other repeated children of a ``ModuleList`` or ``Sequential``.

    A stage, which repeats layers itself (Swin, ConvNeXt), is no block, and its layers are. The parts of a layer that
    repeat, such as experts, heads or convolutions with their norms, are no blocks. If nothing repeats, a layer that is
    alone in a ``ModuleList`` is one (ALBERT).
    """
    candidates: set[nn.Module] = set()
    layers: set[nn.Module] = set()
    others: list[nn.Module] = []
    alone: list[tuple[str, nn.Module]] = []
    # 1. Layers of a known class, and children that repeat.
    for _, module in outermost((path, m) for path, m in walk(model) if has_class(m, BLOCK_CLASSES)):
        candidates.add(module)
        layers.add(module)
    for path, container in walk_all(model):
        if isinstance(container, nn.ModuleList | nn.Sequential):
            # Bare projections, activations and lists are no candidates.
            composed = [(name, m) for name, m in children_of(container) if has_forward(m) and any(m.children())]
            count = Counter(type(m) for _, m in composed)
            for name, module in composed:
                if count[type(module)] == 1:
                    others.append(module)
                else:
                    candidates.add(module)
                    if has_mixer(module) and mlp_widths(module) is not None:  # which may be of 1 x 1 convolutions
                        layers.add(module)
                if isinstance(container, nn.ModuleList) and len(container) == 1:
                    alone.append((f"{path}.{name}".lstrip("."), module))
    # 2. A layer of a stage may be alone in another stage.
    kinds = {type(module) for module in layers if layers.isdisjoint(_below(module))}
    for module in others:
        if type(module) in kinds:
            candidates.add(module)
            layers.add(module)
    # 3. What contains layers is a stage.
    found = outermost((path, m) for path, m in walk(model) if m in candidates and layers.isdisjoint(_below(m)))
    return found or outermost(alone)


def _below(module: nn.Module) -> set[nn.Module]:
    return set(module.modules()) - {module}


def shared_weights(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the weights that belong to two blocks, or to a block and the rest of the model, after their names."""
    inside = {part for _, block in blocks for part in block.modules()}
    rest = (weight for m in model.modules() if m not in inside for weight in m.parameters(recurse=False))
    owner: dict[nn.Parameter, str] = {}
    for path, weights in [*((p, b.parameters()) for p, b in blocks), (f"the rest of {type(model).__name__}", rest)]:
        for weight in weights:
            if owner.setdefault(weight, path) != path:
                yield owner[weight], path, weight
