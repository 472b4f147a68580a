"""What is tiled: the modules that a policy names, or with ``"auto"`` the feed-forward part of every block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.activation import MultiheadAttention
from torch.nn.modules.batchnorm import _NormBase

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.find import (
    find_blocks,
    find_named,
    has_class,
    has_forward,
    outermost,
    unwrapped,
    walk,
)
from lt_tiled.policies import Tiling


@dataclass(frozen=True)
class Tileable:
    """A module to tile."""

    path: str
    module: nn.Module
    method: str = "forward"
    parent: nn.Module | None = None
    """The module that runs others behind this one."""
    members: tuple[tuple[nn.Module, bool], ...] = ()
    """Those others, and whether the chain ends with them."""
    alone: bool = True
    """Whether this one is worth tiling without them."""
    kind: str = ""

    suffix: str = ""
    """What :attr:`path` has behind the module's own."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.kind if self.path == self.kind else f"{self.path} ({self.kind})"


def find_tileable(model: nn.Module, tiling: Tiling) -> list[Tileable]:
    """The modules that the policy names, if any, or with ``"auto"`` the feed-forward part of every block.

    Raises:
        ValueError: If a target matches nothing, or ``"auto"`` finds nothing.
    """
    targets = tiling.targets
    if callable(targets):
        return [_whole(path, m) for path, m in find_named(model, targets, "Tiling")]
    names = [name for name in ([targets] if isinstance(targets, str) else targets) if name != "auto"]
    methods = {name: _methods(model, name) for name in names}
    modules = [name for name in names if not methods[name]]
    named = [_whole(path, m) for path, m in find_named(model, modules, "Tiling")] if modules else []
    found = [*named, *(method for several in methods.values() for method in several)]
    return found if targets != "auto" and "auto" not in targets else _with_feed_forwards(model, found)


def _whole(path: str, module: nn.Module) -> Tileable:
    return Tileable(path, module, kind=type(module).__name__)


def _methods(model: nn.Module, target: str) -> list[Tileable]:
    """The methods that a target names, ``layers.*.feed_forward_chunk`` or ``BertLayer.feed_forward_chunk``, unless it
    names modules.
    """
    everything = list(walk(model))
    owner, _, method = target.rpartition(".")
    if not owner or any(fnmatchcase(path, target) for path, _ in everything):
        return []
    owners = [(path, m) for path, m in everything if has_class(m, (owner,)) or fnmatchcase(path, owner)]
    return [
        Tileable(f"{path}.{method}", m, method, kind=f"{type(m).__name__}.{method}", suffix=f".{method}")
        for path, m in owners
        if callable(getattr(type(m), method, None))
    ]


def _with_feed_forwards(model: nn.Module, named: list[Tileable]) -> list[Tileable]:
    """The blocks' feed-forward parts and what is named beside them, without what is inside of something else."""
    roots = find_blocks(model) or [("", model)]
    found = [tileable for path, root in roots for tileable in _feed_forwards(root, path, top=root is model)]
    if not found:
        raise NothingFoundError(
            f"Tiling found no feed-forward module in {type(model).__name__} (a part of a block that widens and narrows again): name"
            " it, as in Tiling(targets=['MyMLP']) or Tiling(targets='layers.*.mlp'), or turn tiling off with tiling=None."
        )
    heads = {id(m) for _, m in outermost((t.path, t.module) for t in [*named, *found])}
    taken = {id(t.module) for t in named}
    unique = {
        (id(t.module), t.method): t
        for t in [*found, *named]
        if id(t.module) in heads and (t in named or id(t.module) not in taken)
    }
    return [
        replace(t, members=tuple((m, last) for m, last in t.members if id(m) not in taken)) for t in unique.values()
    ]


def _feed_forwards(root: nn.Module, path: str, top: bool = False) -> Iterator[Tileable]:
    chain = None if top else _chain(root, path)
    if chain is not None:
        yield chain
    for name, child in _children(root):
        below = f"{path}.{name}" if path else name
        if _mixes_tokens(name, child):
            continue
        parts = list(walk(child))
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not container and _widens(child) and not any(_mixes_tokens(p.rpartition(".")[2], m) for p, m in parts):
            norms = () if top else _norms_behind(root)
            yield Tileable(below, child, parent=root if norms else None, members=norms, kind=type(child).__name__)
        else:
            yield from _feed_forwards(child, below)


def _children(root: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, unwrapped(child)) for name, child in root.named_children()]


def _chain(root: nn.Module, path: str) -> Tileable | None:
    """A block that holds the two halves of its feed-forward part itself: ``fc1`` and ``fc2``, ``intermediate`` and
    ``output``.
    """
    if not has_forward(root) or isinstance(root, nn.Sequential):
        return None
    children = [
        (n, m) for n, m in root.named_children() if has_forward(m) and unwrapped(m) is m and not _mixes_tokens(n, m)
    ]
    halves = [(name, m, set(_projections(m))) for name, m in children]
    pairs = [
        ((name, first), (other, second))
        for index, (name, first, wider) in enumerate(halves)
        for other, second, narrower in halves[index + 1 :]
        for widths in wider
        if len(wider) == len(narrower) == 1 and widths[1] > widths[0] and widths[::-1] in narrower
    ]
    if len(pairs) != 1:
        return None
    (name, first), (other, second) = pairs[0]
    names = [n for n, _ in root.named_children()]
    if any(_mixes_tokens(n, m) for n, m in list(root.named_children())[names.index(name) : names.index(other)]):
        return None  # Segformer's convolution between the halves
    kind = f"{type(first).__name__} + {type(second).__name__}"
    between = [(m, _is_norm(m)) for _, m in children if _is_norm(m) or _is_entrywise(m)]
    prefix = f"{path}." if path else ""
    return Tileable(
        f"{prefix}{name}+{other}",
        first,
        parent=root,
        members=((second, False), *between),
        alone=False,
        kind=kind,
        suffix=f"+{other}",
    )


_BEHIND = re.compile(r"post.*(feed|ffw?|mlp)", re.IGNORECASE)


def _norms_behind(block: nn.Module) -> tuple[tuple[nn.Module, bool], ...]:
    """The norms of a block whose names say that they stand behind its feed-forward part
    (``post_feedforward_layernorm``).

    A guess that costs nothing where it is wrong: what the block does with the output decides.
    """
    return tuple((m, True) for name, m in block.named_children() if _is_norm(m) and _BEHIND.search(name))


def _is_norm(module: nn.Module) -> bool:
    """Norms over the last dimension; not batch and instance norms."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, _NormBase | nn.GroupNorm)


def _is_entrywise(module: nn.Module) -> bool:
    kind = type(module)
    known = kind.__module__ in ("torch.nn.modules.activation", "transformers.activations") or isinstance(
        module, nn.Dropout
    )
    return known and not issubclass(kind, MultiheadAttention | nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.GLU)


def parts_below(module: nn.Module) -> tuple[str, ...]:
    """Of a mixture of experts, what can be tiled without the router: the experts, routed and shared, by their paths."""
    children = _children(module)
    if not any(name == "experts" for name, _ in children):
        return ()
    routed = [(name, m) for name, m in children if name == "experts" and has_forward(m)]
    lists = [(f"{name}.{n}", m) for name, c in children if isinstance(c, nn.ModuleList) for n, m in _children(c)]
    shared = [
        (name, m) for name, m in children if name != "experts" and not isinstance(m, nn.ModuleList) and _widens(m)
    ]
    return tuple(name for name, _ in [*routed, *lists, *shared])


def has_capacity(module: nn.Module) -> bool:
    """Whether a router sends its experts a limited number of tokens (Switch Transformers' ``expert_capacity``)."""
    return any("capacity" in name and isinstance(value, int | float) for name, value in vars(module).items())


def drops_samples(module: nn.Module) -> bool:
    """Stochastic depth, which draws once for each sample."""
    return any(kind in type(module).__name__ for kind in ("DropPath", "StochasticDepth"))


def _mixes_tokens(name: str, module: nn.Module) -> bool:
    """Whether the module is known to look across tokens: attention, convolutions, recurrences."""
    if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase) or has_capacity(module) or drops_samples(module):
        return True
    label = f"{name} {type(module).__name__}".lower()
    return "attn" in label or "attention" in label


def _widens(module: nn.Module) -> bool:
    """Whether projections lead from some width to a larger one and back, or to experts that do."""
    return any(name == "experts" for name, _ in module.named_children()) or feed_forward_widths(module) is not None


def feed_forward_widths(*modules: nn.Module) -> tuple[int, int] | None:
    """The width of the hidden states and the larger one between the projections of a feed-forward part."""
    widths = [w for module in modules for w in _projections(module)]
    return next(
        (
            (hidden, inner)
            for inner, hidden in widths
            for gate in (1, 2)  # 2: gate and up in one
            if inner > hidden and (hidden, gate * inner) in widths
        ),
        None,
    )


def _projections(module: nn.Module) -> Iterator[tuple[int, int]]:
    """The widths of the projections in a module; an adapted one (LoRA) counts as the one that it adapts."""
    widths = _widths(module)
    if widths is not None:
        yield widths
    else:
        for child in module.children():
            yield from _projections(child)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output width of a projection (``nn.Linear`` and what looks like it, Hugging Face's ``Conv1D``)."""
    for pair in (("in_features", "out_features"), ("nx", "nf")):
        values: Any = tuple(getattr(module, name, None) for name in pair)
        if all(isinstance(value, int) for value in values):
            return values  # type: ignore[no-any-return]
    return None
