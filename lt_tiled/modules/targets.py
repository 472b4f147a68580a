"""What a tiling policy names, or ``"auto"`` finds."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.feed_forward import Tileable, find_feed_forwards
from lt_tiled.modules.find import find_named, has_class, kind_of, outermost, walk
from lt_tiled.modules.norms import find_norms
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
