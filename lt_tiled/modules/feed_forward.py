"""What a block's MLP is, and which norms stand next to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.find import find_blocks, find_named, has_class, has_forward, outermost, unwrapped, walk
from lt_tiled.policies import Tiling


@dataclass(frozen=True)
class Tileable:
    """A module, or a method of it, to tile."""

    path: str
    """The module's path; of a method with the method's name."""
    module: nn.Module
    kind: str
    """The class, or ``Class.method``."""
    method: str = "forward"
    parts: tuple[str, ...] | None = None
    """The children that a method uses; ``None`` for the whole module."""
    parent: nn.Module | None = None
    """The module whose forward calls this one and the norms next to it."""
    before: tuple[nn.Module, ...] = ()
    """Norms whose output goes into this module."""
    after: tuple[nn.Module, ...] = ()
    """Norms that take this module's output."""

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.kind if self.path == self.kind else f"{self.path} ({self.kind})"


def find_tileable(model: nn.Module, tiling: Tiling) -> list[Tileable]:
    """Return the modules that the policy names, or with ``"auto"`` the MLP of every block.

    Raises:
        ValueError: If a target matches nothing.
        NothingFoundError: If ``"auto"`` finds nothing.
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
    return Tileable(path, module, type(module).__name__)


def _method(path: str, module: nn.Module, method: str, **fields: Any) -> Tileable:
    return Tileable(f"{path}.{method}".lstrip("."), module, f"{type(module).__name__}.{method}", method, **fields)


def _methods(model: nn.Module, target: str) -> list[Tileable]:
    """Return the methods that a target such as ``BertLayer.feed_forward_chunk`` names, unless it names modules."""
    everything = list(walk(model))
    owner, _, method = target.rpartition(".")
    if not owner or any(fnmatchcase(path, target) for path, _ in everything):
        return []
    owners = [(path, m) for path, m in everything if has_class(m, (owner,)) or fnmatchcase(path, owner)]
    return [_method(path, m, method) for path, m in owners if callable(getattr(type(m), method, None))]


def _with_feed_forwards(model: nn.Module, named: list[Tileable]) -> list[Tileable]:
    """Return the blocks' MLPs and what else is named, without what is inside of something else."""
    roots = find_blocks(model) or [("", model)]
    found = [tileable for path, root in roots for tileable in _feed_forwards(root, path, top=root is model)]
    if not found:
        raise NothingFoundError(
            f"Tiling found no MLP in {type(model).__name__} (a child of a block with linear layers from hidden_size to"
            " intermediate_size and back): name it, as in Tiling(targets=['MyMLP']) or Tiling(targets='layers.*.mlp'),"
            " or pass tiling=False."
        )
    heads = {id(m) for _, m in outermost((t.path, t.module) for t in [*named, *found])}
    taken = {id(t.module) for t in named}
    unique = {
        (id(t.module), t.method): t
        for t in [*found, *named]
        if id(t.module) in heads and (t in named or id(t.module) not in taken)
    }
    return [
        replace(
            t,
            before=tuple(m for m in t.before if id(m) not in taken),
            after=tuple(m for m in t.after if id(m) not in taken),
        )
        for t in unique.values()
    ]


def _feed_forwards(root: nn.Module, path: str, top: bool = False) -> Iterator[Tileable]:
    before, after = ((), ()) if top else _norms_next_to_mlp(root)
    method = next((name for name in _METHODS if callable(getattr(type(root), name, None))), None)
    if method is not None:
        apart = method != "feed_forward_chunk"  # the others leave the norms to the block
        parts = tuple(n for n, m in _children(root) if not (_mixes_tokens(n, m) or (apart and _is_norm(m))))
        if feed_forward_widths(*(root.get_submodule(n) for n in parts)) is not None:
            yield _method(path, root, method, parts=parts, parent=root, before=before)
            return
    for name, child in _children(root):
        below = f"{path}.{name}" if path else name
        if _mixes_tokens(name, child):
            continue
        inside = list(walk(child))
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not container and _widens(child) and not any(_mixes_tokens(p.rpartition(".")[2], m) for p, m in inside):
            parent = root if before or after else None
            yield Tileable(below, child, type(child).__name__, parent=parent, before=before, after=after)
        else:
            yield from _feed_forwards(child, below)


_METHODS = ("_ff_block", "feed_forward_chunk", "ff_chunk")
"""Methods that are a block's MLP: those of ``nn.TransformerEncoderLayer`` and its decoder, of BERT-like layers, and of
ALBERT and Longformer.
"""


def _children(root: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, unwrapped(child)) for name, child in root.named_children()]


_PRE = re.compile(r"pre.*(feed|ffw?|mlp)|(^|_)(ffn?|mlp|feed_?forward)_(layer)?norm|ln_mlp", re.IGNORECASE)
_SECOND = re.compile(r"post_attention|(norm|ln)_?[23]$|layernorm_after|final_layer_norm", re.IGNORECASE)
_POST = re.compile(r"post.*(feed|ffw?|mlp)", re.IGNORECASE)


def _norms_next_to_mlp(block: nn.Module) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return the norms whose names say that they stand before the block's MLP, and those after it.

    A guess that only costs a recompute of the norm where it is wrong: what the block does with an output decides.
    """
    norms = [(name, m) for name, m in _children(block) if _is_norm(m)]
    after = tuple(m for name, m in norms if _POST.search(name))
    before = tuple(m for name, m in norms if _PRE.search(name) and not _POST.search(name))
    if not before and len(norms) > len(after) + 1 and getattr(block, "norm_first", True):
        before = tuple(m for name, m in norms if _SECOND.search(name) and m not in after)[-1:]
    return before, after


def _is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm over the last dimension; not a batch or instance norm."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, _NormBase | nn.GroupNorm)


def parts_below(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of a mixture's experts, routed and shared: what can be tiled without the router."""
    children = _children(module)
    if not any(name == "experts" for name, _ in children):
        return ()
    routed = [name for name, m in children if name == "experts" and has_forward(m)]
    lists = [f"{name}.{n}" for name, c in children if isinstance(c, nn.ModuleList) for n, _ in _children(c)]
    others = [(name, m) for name, m in children if name != "experts" and not isinstance(m, nn.ModuleList)]
    return (*routed, *lists, *(name for name, m in others if _widens(m)))


def depends_on_others(part: nn.Module) -> str | None:
    """Return why a module is not position-wise although a few tokens may not show it."""
    if isinstance(part, _BatchNorm):
        return "whose statistics in training depend on all tokens"
    if _has_capacity(part):
        return "whose experts have a capacity, so that the result of a token depends on all tokens"
    if _drops_samples(part):
        return "which drops whole samples and would drop tiles"
    return None


def _has_capacity(module: nn.Module) -> bool:
    """Whether a router sends its experts a limited number of tokens (Switch Transformers' ``expert_capacity``)."""
    return any("capacity" in name and isinstance(value, int | float) for name, value in vars(module).items())


def _drops_samples(module: nn.Module) -> bool:
    """Whether the module is stochastic depth, which draws once for each sample."""
    return any(kind in type(module).__name__ for kind in ("DropPath", "StochasticDepth"))


def _mixes_tokens(name: str, module: nn.Module) -> bool:
    """Whether the module is known to look across tokens: attention, convolutions, recurrences, batch norms, shifts."""
    shifts = nn.ConstantPad1d | nn.ConstantPad2d  # RWKV's
    if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase | shifts) or depends_on_others(module) is not None:
        return True
    label = f"{name} {type(module).__name__}".lower()
    # A layer with attention, such as Zamba 2's AttentionDecoderLayer, has an MLP too.
    return ("attn" in label or "attention" in label) and not label.endswith("coderlayer")


def _widens(module: nn.Module) -> bool:
    """Whether projections lead to a larger size and back, or to experts whose projections do."""
    return any(name == "experts" for name, _ in module.named_children()) or feed_forward_widths(module) is not None


def feed_forward_widths(*modules: nn.Module) -> tuple[int, int] | None:
    """Return ``(hidden_size, intermediate_size)`` of an MLP, or ``None`` where its projections do not show them."""
    widths = [w for module in modules for w in _projections(module)]
    pairs = ((hidden, inner) for inner, hidden in widths if inner > hidden)
    # A projection of twice the size is gate and up in one.
    return next((p for p in pairs if p in widths or (p[0], 2 * p[1]) in widths), None)


def _projections(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the sizes of the projections in a module; an adapted one (LoRA) counts as the one that it adapts."""
    widths = _widths(module)
    if widths is not None:
        yield widths
    else:
        for child in module.children():
            yield from _projections(child)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a projection: ``nn.Linear``, JetMoE's experts, Hugging Face's ``Conv1D``."""
    for names in (("in_features", "out_features"), ("input_size", "output_size"), ("nx", "nf")):
        first, second = (getattr(module, name, None) for name in names)
        if isinstance(first, int) and isinstance(second, int):
            return first, second
    return None
