"""What a tiling policy names, or ``"auto"`` finds: MLPs, norms, and the projections of attention behind these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.feed_forward import (
    POST,
    Tileable,
    find_feed_forwards,
    find_sizes,
    is_norm,
    is_one_kernel,
    mixes_tokens,
    projections,
    unwrapped_children,
)
from lt_tiled.modules.find import find_named, has_class, kind_of, outermost, walk
from lt_tiled.modules.patch import roots
from lt_tiled.policies import Tiling


def find_tileable(model: nn.Module, tiling: Tiling) -> list[Tileable]:
    """Return the modules that the policy names: with ``"mlp"`` the MLP of every block, with ``"auto"`` also norms."""
    targets = tiling.targets
    if callable(targets):
        return [Tileable.of_module(path, m, named=True) for path, m in find_named(model, targets, "Tiling")]
    wanted = [targets] if isinstance(targets, str) else targets
    names = [name for name in wanted if name not in ("auto", "mlp")]
    methods = {name: _methods(model, name) for name in names}
    modules = [name for name in names if not methods[name]]
    named = [Tileable.of_module(path, m, named=True) for path, m in find_named(model, modules, "Tiling")]
    found = [*named, *(method for several in methods.values() for method in several)]
    if len(names) < len(wanted):
        found = _with_feed_forwards(model, found)
    return [*found, *find_norms(model, found)] if "auto" in wanted else found


def _methods(model: nn.Module, target: str) -> list[Tileable]:
    """Return the methods that a target such as ``BertLayer.feed_forward_chunk`` names, unless it names modules."""
    everything = list(walk(model))
    owner, _, method = target.rpartition(".")
    if not owner or any(fnmatchcase(path, target) for path, _ in everything):
        return []
    owners = [(path, m) for path, m in everything if has_class(m, (owner,)) or fnmatchcase(path, owner)]
    owners = [(path, m) for path, m in owners if callable(getattr(type(m), method, None))]
    return [Tileable.of_method(path, m, method, named=True) for path, m in owners]


def _with_feed_forwards(model: nn.Module, named: list[Tileable]) -> list[Tileable]:
    """Return the blocks' MLPs and what else is named, without what is inside of something else."""
    roots = find_blocks(model) or [("", model)]
    found = [tileable for path, root in roots for tileable in find_feed_forwards(root, path, top=root is model)]
    if not found:
        raise NothingFoundError(
            f"Tiling found no MLP in {kind_of(model)} (a child of a block with linear layers from hidden_size to"
            " intermediate_size and back): name it, as in Tiling(targets=['MyMLP']) or Tiling(targets='layers.*.mlp'),"
            " or pass tiling=False."
        )
    outer = {id(m) for _, m in outermost((t.path, t.module) for t in [*named, *found])}
    taken = {id(t.module) for t in named}
    unique = {
        (id(t.module), t.method): t
        for t in [*found, *named]
        if id(t.module) in outer and (t in named or id(t.module) not in taken)
    }
    return [
        replace(
            t,
            before=tuple(m for m in t.before if id(m) not in taken),
            after=tuple(m for m in t.after if id(m) not in taken),
        )
        for t in unique.values()
    ]


def find_norms(model: nn.Module, found: Sequence[Tileable]) -> list[Tileable]:
    """Return the norms outside of what was found, those before attention with the projections behind them.

    Norms in Python hold several float32 tensors of the size of the hidden states. ``nn.LayerNorm`` and ``nn.RMSNorm``
    are one kernel and are left out.
    """
    taken = {m for t in found for root in (*roots(t.module, t.parts), *t.before, *t.after) for m in root.modules()}
    behind = {norm: {"parent": b, "after": after} for _, b in find_blocks(model) for norm, after in _norms_of(b)}
    sizes = (find_sizes(*roots(t.module, t.parts)) for t in found)
    hidden = next((known.hidden for known in sizes if known is not None), 1)
    return [
        Tileable.of_module(path, m, norm_of=hidden, **behind.get(m, {}))
        for path, m in walk(model)
        if is_norm(m) and next(m.children(), None) is None and m not in taken and not is_one_kernel(m)
    ]


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
