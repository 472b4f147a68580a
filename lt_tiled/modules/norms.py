"""Which norms run in tiles besides those next to an MLP, and the projections that may run in the same tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lt_tiled.modules.feed_forward import (
    POST,
    Tileable,
    feed_forward_widths,
    is_norm,
    mixes_tokens,
    projection_sizes,
    unwrapped_children,
)
from lt_tiled.modules.find import find_blocks, walk
from lt_tiled.modules.patch import roots


def find_norms(model: nn.Module, found: Sequence[Tileable]) -> list[Tileable]:
    """Return the norms outside of what was found, those before attention with the projections behind them.

    Norms in Python hold several float32 tensors of the size of the hidden states. ``nn.LayerNorm`` and ``nn.RMSNorm``
    are one kernel and are left out.
    """
    taken = {
        id(part) for t in found for root in (*roots(t.module, t.parts), *t.before, *t.after) for part in root.modules()
    }
    behind = {id(norm): (block, projections) for _, block in find_blocks(model) for norm, projections in _first(block)}
    sizes = (feed_forward_widths(*roots(t.module, t.parts)) for t in found)
    hidden = next((hidden for hidden, _ in filter(None, sizes)), 1)
    norms = ((path, m) for path, m in walk(model) if is_norm(m) and not any(True for _ in m.children()))
    made = []
    for path, norm in norms:
        if id(norm) not in taken and not is_one_kernel(norm):
            parent, after = behind.get(id(norm), (None, ()))
            made.append(Tileable.of_module(path, norm, parent=parent, after=after, norm_of=hidden))
    return made


def is_one_kernel(norm: nn.Module) -> bool:
    """Whether a norm holds no more than its output."""
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm)


def _first(block: nn.Module) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Yield the norm before the block's attention and the attention's projections.

    A guess that costs nothing where it is wrong: what the block does with the norm's output decides.
    """
    named = unwrapped_children(block)
    norm = next((m for name, m in named if is_norm(m) and not POST.search(name)), None)
    attention = [m for name, m in named if mixes_tokens(name, m)]
    if norm is not None:
        yield norm, tuple(m for part in attention for m in _projections(part))


def _projections(module: nn.Module) -> Iterator[nn.Module]:
    for _, child in unwrapped_children(module):
        if projection_sizes(child) is not None:
            # The product of quantized weights runs in a custom Function, where the recompute could not leave it out.
            if all(p.is_floating_point() for p in child.parameters()):
                yield child
        else:
            yield from _projections(child)
