"""Which norms run in tiles besides those next to an MLP, and the projections that may run in the same tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.feed_forward import (
    POST,
    Tileable,
    feed_forward_widths,
    is_norm,
    mixes_tokens,
    projections,
    unwrapped_children,
)
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import roots


def find_norms(model: nn.Module, found: Sequence[Tileable]) -> list[Tileable]:
    """Return the norms outside of what was found, those before attention with the projections behind them.

    Norms in Python hold several float32 tensors of the size of the hidden states. ``nn.LayerNorm`` and ``nn.RMSNorm``
    are one kernel and are left out.
    """
    taken = {m for t in found for root in (*roots(t.module, t.parts), *t.before, *t.after) for m in root.modules()}
    behind = {norm: {"parent": b, "after": after} for _, b in find_blocks(model) for norm, after in _norms_of(b)}
    sizes = (feed_forward_widths(*roots(t.module, t.parts)) for t in found)
    hidden = next((hidden for hidden, _ in filter(None, sizes)), 1)
    return [
        Tileable.of_module(path, m, norm_of=hidden, **behind.get(m, {}))
        for path, m in walk(model)
        if is_norm(m) and next(m.children(), None) is None and m not in taken and not is_one_kernel(m)
    ]


def is_one_kernel(norm: nn.Module) -> bool:
    """Whether a norm holds no more than its output."""
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm)


def _norms_of(block: nn.Module) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Yield the norm before the block's attention with the attention's projections, and the block's other norms.

    A guess that costs nothing where it is wrong: what the block does with the norm's output decides.
    """
    named = unwrapped_children(block)
    norm = next((m for name, m in named if is_norm(m) and not POST.search(name)), None)
    if norm is not None:
        inside = (part for name, m in named if mixes_tokens(name, m) for _, part in unwrapped_children(m))
        found = (p for part in inside for p in projections(part))
        # The product of quantized weights runs in a custom Function, where the recompute could not leave it out.
        yield norm, tuple(p for p in found if all(w.is_floating_point() for w in p.parameters()))
    yield from ((m, ()) for _, m in named if is_norm(m) and m is not norm)
