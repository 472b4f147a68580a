"""The blocks of a model: the innermost repeated modules that hold all that a layer computes."""

from __future__ import annotations

from collections import Counter

from torch import nn

from lt_tiled.modules.feed_forward import has_mixer, mlp_widths
from lt_tiled.modules.find import children_of, has_class, has_forward, outermost, walk

BLOCK_CLASSES = ("GradientCheckpointingLayer", "TransformerEncoderLayer", "TransformerDecoderLayer")
"""The base class of Hugging Face's layers, and torch's own layers."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks: layers of a known class, and other repeated children of a ``ModuleList`` or ``Sequential``.

    A stage, which repeats layers itself (Swin, ConvNeXt), is no block, and its layers are. The parts of a layer that
    repeat, such as experts, heads or convolutions with their norms, are no blocks. If nothing repeats, a layer that is
    alone in a ``ModuleList`` is one (ALBERT).
    """
    inside = list(walk(model))[1:]
    layers = {module for _, module in outermost(inside, lambda module: has_class(module, BLOCK_CLASSES))}
    candidates = set(layers)
    alone: list[tuple[str, nn.Module]] = []
    for path, container in walk(model):
        if isinstance(container, nn.ModuleList | nn.Sequential):
            children = children_of(container)
            count = Counter(type(module) for _, module in children)
            for name, module in children:
                # Bare projections, activations and lists are no candidates.
                if not has_forward(module) or not any(module.children()):
                    continue
                if count[type(module)] > 1:
                    candidates.add(module)
                    if has_mixer(module) and mlp_widths(module) is not None:
                        layers.add(module)
                elif isinstance(container, nn.ModuleList) and len(children) == 1:
                    alone.append((f"{path}.{name}".lstrip("."), module))
    # What contains layers is a stage.
    found = outermost(inside, lambda module: module in candidates and layers.isdisjoint(list(module.modules())[1:]))
    return found or outermost(alone)
