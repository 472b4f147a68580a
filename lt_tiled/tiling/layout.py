"""How a call is cut into tiles, and how their outputs go together in the untiled order and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from math import ceil, prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.policies import Tiling

MIN_TILE_TOKENS = 1024
"""Below this many rows a matrix multiply is too thin to be efficient; ``num_shards="auto"`` never goes below it."""


def sums_share(tokens: int) -> float:
    """Return the time that a tile of large weights takes for gradient sums, relative to its arithmetic.

    Estimated for an H100: for each element of a weight a tile reads and writes the float32 sum, 8 bytes at 3.35 TB/s,
    and takes 8 FLOPs per token at 400 TFLOP/s.
    """
    return (8 / 3.35e12) / (8 * tokens / 400e12)


LARGE_TILE_TOKENS = next(size for size in (1024, 2048, 4096) if sums_share(size) <= 0.05)
"""The same for large weights."""
MAX_TILE_TOKENS = 8192
"""Above it more tiles cost next to nothing: the sums of large weights take less than 2 % of the time."""
LARGE_SUMS = 32 * 2**20
"""The most bytes of float32 gradient sums, of three weights as in a gated MLP, that are assumed to stay in the cache of
a GPU (an H100 has 50 MiB).
"""

Bounds = tuple[int, int]


def tile_bounds(tiling: Tiling, tokens: int, hidden_size: int, widths: tuple[int, int] | None = None) -> list[Bounds]:
    """Cut tokens into tiles whose sizes differ by one token at most, the larger ones first.

    Memory that a tile frees then fits the next one. ``tile_tokens`` is the most tokens of a tile.

    ``"auto"`` uses ``ceil(12 * intermediate_size / hidden_size)`` tiles: the widest tensor of a tile is then a twelfth
    as large as the hidden states of all tokens. The six such tensors that a gated MLP holds in its backward pass are
    half as large, so the peak of a block is about what attention holds (``pytest tests/planner/test_floor.py``),
    and each further tile would cost time on the host and save little. Where the size is not known it uses
    ``ceil(tokens / hidden_size)``, as Arctic Long Sequence Training does (arXiv:2506.13996). With ``"auto"`` no tile
    has fewer than :data:`MIN_TILE_TOKENS` tokens, or :data:`LARGE_TILE_TOKENS` for large weights, and where the size is
    known none has more than :data:`MAX_TILE_TOKENS`. Every tile has two or
    more: one does not show the layout of an output, and the compiler treats sizes of one apart.
    """
    return list(_bounds(tiling.tile_tokens, tiling.num_shards, tokens, hidden_size, widths))


@lru_cache(maxsize=1024)  # each layer of each step asks for the same ones
def _bounds(
    tile_tokens: int | None,
    num_shards: int | Literal["auto"],
    tokens: int,
    hidden_size: int,
    widths: tuple[int, int] | None,
) -> tuple[Bounds, ...]:
    rows = max(1, widths[0] // hidden_size) if widths else 1  # a norm of each head (q_norm) has several rows a token
    if tile_tokens is not None:
        tiles = ceil(tokens / (tile_tokens * rows))
    elif num_shards == "auto":
        tiles = ceil(12 * widths[1] / widths[0]) if widths else ceil(tokens / hidden_size)
        tiles = max(tiles, ceil(tokens / (MAX_TILE_TOKENS * rows))) if widths else tiles
        large = widths is not None and 3 * 4 * widths[0] * widths[1] > LARGE_SUMS
        tiles = min(tiles, tokens // ((LARGE_TILE_TOKENS if large else MIN_TILE_TOKENS) * rows))
    else:
        tiles = num_shards
    tiles = max(1, min(tiles, tokens // 2))
    size, larger = divmod(tokens, tiles)
    return tuple(pairwise(index * size + min(index, larger) for index in range(tiles + 1)))


def sizes_of(bounds: Sequence[Bounds]) -> list[int]:
    """Return the number of tokens of each tile."""
    return [high - low for low, high in bounds]


T = TypeVar("T")
tiles_to_run: ContextVar[Callable[[Iterable[Any]], Iterable[Any]]] = ContextVar("tiles_to_run")
"""Set by a simulation, for its own thread: takes rows, one for each tile, and returns those of the tiles to run."""


def each_tile(rows: Iterable[T]) -> Iterable[T]:
    """Return all rows, one for each tile; in a simulation, only those that it runs."""
    choose = tiles_to_run.get(None)
    return rows if choose is None else choose(rows)


def memory_order(tensor: Tensor) -> list[int] | None:
    """Return the order of dimensions in which a tensor is contiguous, if there is one that keeps the last dimension.

    The tiles of a norm of each head are cut in this order where the model swapped heads and tokens before it. Else its
    input would be copied, and its output would have another layout than untiled, as attention's output then has, which
    the model would copy as well.
    """
    if tensor.is_nested:
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if order[-1] == tensor.dim() - 1 and tensor.permute(order).is_contiguous() else None


@dataclass(frozen=True)
class TokenShape:
    """The leading dimensions of the hidden states, ``[B, S]`` of ``[B, S, H]``: one entry per token, row by row."""

    lead: torch.Size

    @cached_property
    def tokens(self) -> int:
        return prod(self.lead)

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor has an entry for each token."""
        return tensor.shape[: len(self.lead)] == self.lead

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return ``[B, S, ...]`` as ``[tokens, ...]``: a view where the strides allow it."""
        return tensor.reshape(self.tokens, *tensor.shape[len(self.lead) :])

    def tiles(self, whole: Tensor, bounds: Sequence[Bounds]) -> Sequence[Tensor]:
        """Return each tile of ``[B, S, ...]`` as the module sees it: a view where the strides allow it."""
        if len(bounds) == 1:  # in its own layout
            return [whole.view_as(whole)]
        flat, size, last = self.flatten(whole), bounds[0][1], bounds[-1][1] - bounds[-1][0]
        # Tiles of the first size come first, then those of the last.
        first = len(bounds) if size == last else (self.tokens - last * len(bounds)) // (size - last)
        # Not of one dimension of all tokens: with its strides torch's matmul would copy the weights for each tile.
        lead, rest = (1,) * (len(self.lead) - 1), flat.shape[1:]
        found = flat[: first * size].view(first, *lead, size, *rest).unbind()
        if first == len(bounds):
            return found
        return [*found, *flat[first * size :].view(len(bounds) - first, *lead, last, *rest).unbind()]

    def unflatten(self, flat: Tensor) -> Tensor:
        """Return ``[tokens, ...]`` as ``[B, S, ...]``."""
        return flat.view(*self.lead, *flat.shape[1:])

    def as_tile(self, flat: Tensor) -> Tensor:
        """Return ``[t, ...]`` as the module sees it: ``[1, t, ...]`` for hidden states ``[B, S, H]``."""
        return flat.view(*self.tile_lead(flat.shape[0]), *flat.shape[1:])

    def tile_lead(self, tokens: int) -> tuple[int, ...]:
        """Return the leading dimensions of a tile: ``[1, t]`` for hidden states ``[B, S, H]``, ``[B, S]`` for all."""
        return tuple(self.lead) if tokens == self.tokens else (1,) * (len(self.lead) - 1) + (tokens,)


Kind = Literal["tokens", "flat", "sum", "mean", "constant"]


@dataclass(frozen=True)
class OutputLayout:
    """What the module returns: the tree, and for each leaf how the tiles' values are put together."""

    tree: pytree.TreeSpec
    kinds: tuple[Kind, ...]
    names: tuple[str, ...]


def describe_output(output: Any, shape: TokenShape, tokens: int) -> OutputLayout | None:
    """Return the layout of a tile's output if it is one tensor, whose shape alone shows it, else ``None``."""
    if isinstance(output, Tensor) and output.shape[: len(shape.lead)] == shape.tile_lead(tokens):
        return OutputLayout(pytree.tree_structure(output), ("tokens",), ("",))
    return None


def compare_outputs(
    outputs: tuple[Any, Any],
    sizes: tuple[int, int],
    shape: TokenShape,
    reductions: Mapping[str, str] | None,
    module: str,
) -> OutputLayout:
    """Find each leaf's layout from the outputs for two numbers of tokens: what grows with the tokens is per token.

    Raises:
        NotPositionWiseError: If a leaf is not per token and ``reductions`` has no entry for it.
    """
    (few, tree), (many, other_tree) = (_flatten_named(output) for output in outputs)
    if tree != other_tree:
        raise NotPositionWiseError(
            f"{module}: its output has another structure for {sizes[0]} tokens than for {sizes[1]}, so it cannot be"
            f" tiled. {REMEDY}"
        )

    def kind_of(name: str, leaves: tuple[Any, Any]) -> Kind:
        where, first = f"{module}: output {name or 'value'}", leaves[0]
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            if all(t.shape[: len(shape.lead)] == shape.tile_lead(n) for t, n in zip(leaves, sizes, strict=True)):
                return "tokens"
            if all(t.dim() > 0 and t.shape[0] == n for t, n in zip(leaves, sizes, strict=True)):
                return "flat"
            reduction = (reductions or {}).get(name)
            if reduction is None:
                raise NotPositionWiseError(
                    f"{where} of shape {list(first.shape)} is not per token, so it would change with the tiles. Do not"
                    f' tile this module, or say how to combine it: reductions={{"{name}": "sum"}} or "mean".'
                )
            return "sum" if reduction == "sum" else "mean"
        if _is_constant(first, where):
            if first != leaves[1]:
                raise NotPositionWiseError(
                    f"{where} is {first!r} for {sizes[0]} tokens and {leaves[1]!r} for {sizes[1]}, so tiles cannot be"
                    f" combined. {REMEDY}"
                )
            return "constant"
        raise NotPositionWiseError(f"{where} is a tensor in one call and none in another. {REMEDY}")

    kinds = tuple(kind_of(name, (a, b)) for (name, a), (_, b) in zip(few, many, strict=True))
    return OutputLayout(tree, kinds, tuple(name for name, _ in few))


def whole_output(output: Any, module: str) -> OutputLayout:
    """Return the layout of the output of a call in one tile, which is the output itself.

    Raises:
        NotPositionWiseError: If it has a leaf that is no tensor and no number or text.
    """
    named, tree = _flatten_named(output)
    kinds: list[Kind] = [  # the sum over one tile is the tile's own value
        "constant" if _is_constant(leaf, f"{module}: output {name or 'value'}") else "sum" for name, leaf in named
    ]
    return OutputLayout(tree, tuple(kinds), tuple(name for name, _ in named))


def _is_constant(leaf: Any, where: str) -> bool:
    if isinstance(leaf, Tensor):
        return False
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return True
    raise NotPositionWiseError(
        f"{where} is of type {type(leaf).__name__}. Outputs must be tensors, or containers of them that torch can"
        f" flatten. {REMEDY}"
    )


def _flatten_named(output: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    try:
        leaves, tree = pytree.tree_flatten_with_path(output)
    except ValueError:  # a container that torch can flatten but not name
        plain, tree = pytree.tree_flatten(output)
        return [(f"[{index}]", leaf) for index, leaf in enumerate(plain)], tree
    return [(pytree.keystr(path), leaf) for path, leaf in leaves], tree


class OutputAssembly:
    """Collects the tiles' outputs into tensors of the untiled shape, ``leaves``, that are allocated once."""

    def __init__(self, layout: OutputLayout, shape: TokenShape, bounds: Sequence[Bounds], module: str) -> None:
        self.layout, self.shape, self.bounds, self.module = layout, shape, bounds, module
        self.leaves: list[Any] = []
        self._places: list[Sequence[Tensor]] = []
        """Of each leaf, where the tiles' values go."""
        self._one: Sequence[Tensor] | None = None
        """The same of an output that is one tensor per token."""

    def add(self, output: Any, index: int) -> None:
        """Put the output of the tile with that index in its place."""
        if self._one is not None and isinstance(output, Tensor) and output.shape == (place := self._one[index]).shape:
            place.copy_(output)
            return
        leaves = leaves_of(output, self.layout)
        if leaves is None:
            raise NotPositionWiseError(
                f"{self.module}: its output changes its structure from tile to tile, so it cannot be tiled. {REMEDY}"
            )
        if not self.leaves:
            self.leaves = [self._allocate(leaf, kind) for leaf, kind in zip(leaves, self.layout.kinds, strict=True)]
            self._places = [
                tile_views(whole, kind, self.shape, self.bounds)
                for whole, kind in zip(self.leaves, self.layout.kinds, strict=True)
            ]
            self._one = self._places[0] if self.layout.kinds == ("tokens",) and self.layout.tree.is_leaf() else None
        for places, leaf, kind, name in zip(self._places, leaves, self.layout.kinds, self.layout.names, strict=True):
            place = places[index]
            if isinstance(leaf, Tensor) == (kind == "constant"):
                raise NotPositionWiseError(
                    f"{self.module}: output {name or 'value'} is a tensor in one call and none in another. {REMEDY}"
                )
            if kind == "tokens" or kind == "flat":
                if leaf.shape != place.shape:
                    raise NotPositionWiseError(
                        f"{self.module}: output {name or 'value'} is not per token: {list(leaf.shape)} for"
                        f" {sizes_of(self.bounds)[index]} tokens. {REMEDY}"
                    )
                place.copy_(leaf)
            elif kind == "sum":
                place.add_(leaf)
            elif kind == "mean":
                place.add_(leaf, alpha=sizes_of(self.bounds)[index] / self.shape.tokens)

    def _allocate(self, leaf: Any, kind: Kind) -> Any:
        # In the final shape, not as a view of another one: what a custom Function returns may be changed in place only
        # if it is no view.
        if kind == "tokens":
            return leaf.new_empty(*self.shape.lead, *leaf.shape[len(self.shape.lead) :])
        if kind == "flat":
            return leaf.new_empty(self.shape.tokens, *leaf.shape[1:])
        return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def leaves_of(output: Any, layout: OutputLayout) -> list[Any] | None:
    """Return the leaves of an output, or ``None`` if its structure is another one."""
    if isinstance(output, Tensor):
        return [output] if layout.tree.is_leaf() else None
    leaves, tree = pytree.tree_flatten(output)
    return leaves if tree == layout.tree else None


def tile_views(whole: Any, kind: Kind, shape: TokenShape, bounds: Sequence[Bounds]) -> Sequence[Any]:
    """Return for each tile its part of an output or of its gradient, in the shape of the tile's output."""
    if kind == "tokens":
        return shape.tiles(whole, bounds)
    return whole.split(sizes_of(bounds)) if kind == "flat" else [whole] * len(bounds)


def gradients_of_tiles(
    gradients: Sequence[Tensor | None], layout: OutputLayout, shape: TokenShape, bounds: Sequence[Bounds]
) -> list[Iterable[Tensor | None]]:
    """Return for each leaf of an output the gradients of the tiles, given that of the whole."""
    found: list[Iterable[Tensor | None]] = []
    for whole, kind in zip(gradients, layout.kinds, strict=True):
        views: Iterable[Any] = repeat(None) if whole is None else tile_views(whole, kind, shape, bounds)
        if whole is not None and kind == "mean":
            views = (g * (n / shape.tokens) for g, n in zip(views, sizes_of(bounds), strict=True))
        found.append(views)
    return found
