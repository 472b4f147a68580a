"""The blocks of a model: the innermost repeated modules that hold all that a layer computes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lt_tiled.modules.feed_forward import mixes_tokens, projection_sizes, widths_of
from lt_tiled.modules.find import has_class, has_forward, outermost, unwrapped, walk, walk_all

BLOCK_CLASSES = ("GradientCheckpointingLayer", "TransformerEncoderLayer", "TransformerDecoderLayer")
"""The base class of Hugging Face's layers, and torch's own layers."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks: layers of a known class, and other repeated children of a ``ModuleList`` or ``Sequential``.

    A stage, which repeats layers itself (Swin, ConvNeXt), is no block, and its layers are. The parts of a layer that
    repeat, such as experts, heads or convolutions with their norms, are no blocks. If nothing repeats, a layer that is
    alone in a ``ModuleList`` is one (ALBERT).
    """
    known = [(path, m) for path, m in walk(model) if has_class(m, BLOCK_CLASSES)]
    layers = {m for _, m in known}
    others = (pair for path, m in walk_all(model) for pair in _repeated(path, m))
    found = outermost([*known, *((path, m) for path, m in others if layers.isdisjoint(m.modules()))])
    lists = [(path, m) for path, m in walk(model) if isinstance(m, nn.ModuleList) and len(m) == 1]
    found = found or outermost(pair for path, m in lists for pair in _repeated(path, m, times=1))
    kinds = {type(layer) for _, m in found for layer in _layers_in(m)}
    blocks = list[tuple[str, nn.Module]]()
    for path, m in found:  # of a stage its layers, also one alone
        blocks += outermost(pair for pair in walk(m, path) if type(pair[1]) in kinds) or [(path, m)]
    return blocks


def _layers_in(module: nn.Module) -> list[nn.Module]:
    """Return the layers that a module repeats: they mix tokens and have an MLP, which may be of 1 x 1 convolutions."""
    layers = []
    for path, part in outermost(pair for below, m in walk_all(module) for pair in _repeated(below, m)):
        inside = [(name.rpartition(".")[2], m) for name, m in walk(part)]
        sizes = [size for _, m in inside if (size := projection_sizes(m) or _sizes_of_convolution(m)) is not None]
        mixes = any(mixes_tokens(name, m) for name, m in inside)
        if mixes and widths_of(sizes) is not None and not mixes_tokens(path, part):
            layers += _layers_in(part) or [part]
    return layers


def _sizes_of_convolution(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.modules.conv._ConvNd) and max(module.kernel_size) == 1:
        return module.in_channels, module.out_channels
    return None


def _repeated(path: str, container: nn.Module, times: int = 2) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return
    children = [(f"{path}.{name}" if path else name, unwrapped(child)) for name, child in container.named_children()]
    composed = [(p, m) for p, m in children if has_forward(m) and any(True for _ in m.children())]
    classes = [type(m) for _, m in composed]
    yield from ((p, m) for p, m in composed if classes.count(type(m)) >= times)


def shared_weights(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the weights that belong to two blocks, or to a block and the rest of the model, after their names."""
    inside = {part for _, block in blocks for part in block.modules()}
    rest = (weight for m in model.modules() if m not in inside for weight in m.parameters(recurse=False))
    owner: dict[nn.Parameter, str] = {}
    for path, weights in [*((p, b.parameters()) for p, b in blocks), (f"the rest of {type(model).__name__}", rest)]:
        for weight in weights:
            if owner.setdefault(weight, path) != path:
                yield owner[weight], path, weight
