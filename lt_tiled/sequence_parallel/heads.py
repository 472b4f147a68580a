"""Attention of a few heads at a time, from their projections on, so that queries, keys, values and what is exchanged of
all heads are never alive together.

NOTE [Head tiles]
An attention module runs once for each part of its heads, with the rows of its query, key and value projections that
belong to them, up to the input of its output projection. Nothing of that is saved: the backward pass runs each part
again with a graph and takes its gradients. This is UPipe (arXiv:2602.21196) as a function of the module, whose code
does not change. Parts consist of whole groups of query heads that share a key-value head, so each row of the
projections gets its gradient from one part, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Patch, remove_patch, set_patch
from lt_tiled.sequence_parallel.kept import keeping_nothing, kept
from lt_tiled.sequence_parallel.region import Region, current, entered
from lt_tiled.tiling.recompute import AutocastState, RandomState, SavedCounter, random_state_kept, saves_elsewhere
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.weights import Substituted, Weight, paired, trainable_weights

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class HeadTilesPatch(Patch):
    """On an attention module whose heads are computed in parts."""

    attribute = "_lt_tiled_head_tiles"

    def __init__(self, path: str) -> None:
        self.path = path


@dataclass(frozen=True)
class _Part:
    """Some heads: the rows of each projection, and the columns of the output projection's input."""

    queries: slice
    keys: slice

    def rows(self, projection: str) -> slice:
        return self.queries if projection == "q_proj" else self.keys


def _parts(module: Any, tiles: int, size: int) -> list[_Part]:
    """Cut the heads into at most ``tiles`` parts, each of which has at least one query head for each rank."""
    width = module.head_dim
    heads, keys = (linear.out_features // width for linear in (module.q_proj, module.k_proj))
    group, tiles = heads // keys, min(tiles, keys)
    while tiles > 1 and keys // tiles * group < size:
        tiles -= 1
    cuts = [keys * index // tiles * width for index in range(tiles + 1)]
    return [_Part(slice(low * group, high * group), slice(low, high)) for low, high in pairwise(cuts)]


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: HeadTilesPatch = self.__dict__[HeadTilesPatch.attribute]
    region = current()
    if not patch.active or region is None or region.head_tiles == 1:
        return patch.inner(self, *args, **kwargs)
    parts = _parts(self, region.head_tiles, region.size)
    if len(parts) < region.head_tiles:
        inform(
            f"{patch.path} computes its heads in {len(parts)} parts instead of {region.head_tiles}: each part has whole"
            f" groups of query heads, and at least one head for each of {region.size} ranks",
            once=f"head tiles {region.owner}",
        )
    if len(parts) == 1:
        return patch.inner(self, *args, **kwargs)
    given = args[:1] or (kwargs.pop("hidden_states", None),)
    leaves = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
    if not isinstance(given[0], Tensor) or any(t.requires_grad for t in leaves):
        raise ValueError(
            f"{patch.path} is called with other tensors that want a gradient than hidden states, so its heads cannot be"
            " computed in parts: set head_tiles=1."
        )
    call = _Call(self, patch, region, parts, args[1:], kwargs, AutocastState.now(given[0].device))
    weights = call.weights()
    attended = _HeadTiles.apply(call, given[0], *(weight.tensor for weight in weights))
    output = self.o_proj(attended)
    return pytree.tree_map(lambda leaf: output if leaf is _OUTPUT else leaf, call.output)


_forward.__name__ = "forward"  # what pickle looks up on the class
_OUTPUT = object()


@dataclass(eq=False)
class _Call:
    """One call of an attention module."""

    module: Any
    patch: HeadTilesPatch
    region: Region
    parts: list[_Part]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: AutocastState
    output: Any = None
    """What the module returned, with a mark in place of its tensor."""
    random: RandomState | None = None
    """The generators' state before the forward pass, if it drew numbers."""

    def weights(self) -> list[Weight]:
        """Return the trainable weights in front of the output projection."""
        found = trainable_weights(Work(self.module.forward, (self.module,)))
        return [weight for weight in found if not any(owner is self.module.o_proj for owner, _ in weight.places)]

    def projection_of(self, weight: Weight) -> str | None:
        """Return which of the projections a weight belongs to, if any."""
        owners = [owner for owner, _ in weight.places]
        return next((name for name in _PROJECTIONS[:3] if getattr(self.module, name) in owners), None)

    def frozen(self, part: _Part) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the projections' weights that want no gradient, with their rows of a part."""
        for name in _PROJECTIONS[:3]:
            linear = getattr(self.module, name)
            yield from (
                (t, t[part.rows(name)]) for t in (linear.weight, linear.bias) if t is not None and not t.requires_grad
            )

    def run(self, part: _Part, hidden: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the input of the output projection for some heads.

        Raises:
            ValueError: If the module does something else with it than to project it.
        """
        mode = _UpToOutput([*pairs, *self.frozen(part)], self.module.o_proj)
        try:
            with entered(self.region), keeping_nothing(), mode:
                output = self.patch.inner(self.module, hidden, *self.args, **self.kwargs)
        finally:
            mode.end()
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(tensors) != 1 or tensors[0] is not mode.found:
            raise ValueError(
                f"{self.patch.path} ({type(self.module).__name__}) does not return what its o_proj returns and nothing"
                " else, so its heads cannot be computed in parts: set head_tiles=1."
            )
        self.output = pytree.tree_map(lambda leaf: _OUTPUT if leaf is mode.found else leaf, output)
        return tensors[0]


class _UpToOutput(Substituted):
    """Also lets a linear module return its input, and notes it."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], linear: nn.Linear) -> None:
        super().__init__(pairs)
        self._weight: Any = linear.weight
        self.found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and self._weight is not None and args[1] is self._weight:
            self.found = args[0]
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def end(self) -> None:
        super().end()
        self._weight = None


class _HeadTiles(torch.autograd.Function):
    """Attention up to its output projection; the inputs are hidden states and trainable weights."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.call, ctx.wants = call, ctx.needs_input_grad[1:]
        ctx.save_for_backward(hidden)

        def compute() -> Tensor:
            start = RandomState.now(hidden.device)
            whole = None
            own = call.weights()
            for part in call.parts:
                pairs = [(t, _rows(t, call.projection_of(w), part)) for w in own for t in w.now()]
                out = call.run(part, hidden, pairs)
                whole = out.new_empty(*out.shape[:-1], call.parts[-1].queries.stop) if whole is None else whole
                whole[..., part.queries] = out
            call.random = None if start.same_as(RandomState.now(hidden.device)) else start
            assert whole is not None
            return whole

        where = kept("attention")
        if where is None:
            return compute()

        def store(found: Tensor) -> Any:
            return where.pack(found), call.output

        def load(stored: Any) -> Tensor:
            call.output = stored[1]
            return where.unpack(stored[0])

        value: Tensor = where.value(compute, store, load)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{call.patch.path}: attention in head tiles has no second derivative, and this backward pass was called"
                " with create_graph=True. Call it without, or set head_tiles=1."
            )
        (hidden,) = ctx.saved_tensors
        weights = call.weights()
        sums: list[Any] = [None] * (1 + len(weights))
        outside = saves_elsewhere()
        with random_state_kept(hidden.device, call.random) if call.random is not None else nullcontext():
            for part in call.parts:
                _add_gradients(call, part, hidden, weights, gradient[..., part.queries], ctx.wants, sums, outside)
        return (None, *sums)


def _rows(tensor: Tensor, projection: str | None, part: _Part) -> Tensor:
    return tensor if projection is None else tensor[part.rows(projection)]


def _add_gradients(
    call: _Call,
    part: _Part,
    hidden: Tensor,
    weights: Sequence[Weight],
    gradient: Tensor,
    wants: Sequence[bool],
    sums: list[Any],
    outside: bool,
) -> None:
    """Run some heads again with a graph, and add their gradients to the sums."""
    names = [call.projection_of(weight) for weight in weights]
    x = hidden.detach().requires_grad_(wants[0])
    leaves = [_rows(w.now()[-1].detach(), name, part).requires_grad_() for w, name in zip(weights, names, strict=True)]
    pairs = paired(weights, leaves)
    with torch.enable_grad(), call.autocast.context(), SavedCounter() if outside else nullcontext():
        out = call.run(part, x, pairs)
    # Custom autograd Functions get the weights themselves: see NOTE [Substitution].
    direct = [(index, t) for index, w in enumerate(weights) if names[index] is None for t in w.now() if t.requires_grad]
    targets = [*([x] if wants[0] else []), *leaves, *(t for _, t in direct)]
    found = list(torch.autograd.grad(out, targets, gradient, allow_unused=True))
    if wants[0]:
        sums[0] = _added(sums[0], found.pop(0))
    for index, (weight, name) in enumerate(zip(weights, names, strict=True), 1):
        own = found.pop(0)
        if name is None:
            sums[index] = _added(sums[index], own)
            continue
        if sums[index] is None:
            sums[index] = torch.empty_like(weight.tensor, requires_grad=False)
        sums[index][part.rows(name)] = 0 if own is None else own
    for (index, _), own in zip(direct, found, strict=True):
        sums[index + 1] = _added(sums[index + 1], own)


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total.add_(gradient)


def find_attention(modules: Sequence[tuple[str, nn.Module]], tiles: int) -> list[tuple[str, nn.Module]]:
    """Return the attention modules in these, whose heads can be computed in parts.

    Raises:
        ValueError: If there are none.
    """
    found = []
    for path, block in modules:
        for below, module in [("", block), *walk(block)]:
            linears = [module._modules.get(name) for name in _PROJECTIONS]
            if all(type(linear) is nn.Linear for linear in linears) and isinstance(
                getattr(module, "head_dim", None), int
            ):
                found.append((f"{path}.{below}".strip("."), module))
    if not found:
        raise ValueError(
            f"head_tiles={tiles} needs attention modules with head_dim and four linear layers {', '.join(_PROJECTIONS)},"
            f" as Llama has them, and there are none in {modules[0][0]}: set head_tiles=1."
        )
    return found


def tile_heads(modules: Sequence[tuple[str, nn.Module]]) -> Callable[[], None]:
    """Compute the heads of attention modules in parts. Return what undoes it."""
    for path, module in modules:
        set_patch(module, HeadTilesPatch(path), _forward)

    def undo() -> None:
        for _, module in modules:
            remove_patch(module, HeadTilesPatch, _forward)

    return undo
