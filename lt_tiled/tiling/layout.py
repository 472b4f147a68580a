"""How a call is cut into tiles, how their outputs go together in the untiled order and shape, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise, repeat
from math import ceil, prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.policies import Tiling

MIN_TILE_TOKENS = 1024
"""Below this many rows a matrix multiply is too thin to be efficient; ``num_shards="auto"`` never goes below it."""


def sums_share(tokens: int, summed: int = 1, used: int = 1) -> float:
    """Return the time that a tile of large weights takes for gradient sums, relative to its arithmetic.

    Estimated for an H100: for each element that it sums, a tile reads and writes the float32 sum, 8 bytes at 3.35 TB/s.
    For each element that a token uses, it takes 8 FLOPs per token at 400 TFLOP/s. An MLP uses what it sums; a mixture
    of experts uses a part of it.
    """
    return (8 * summed / 3.35e12) / (8 * used * tokens / 400e12)


MAX_SUMS_SHARE = 0.05
"""The largest such share with ``num_shards="auto"``."""
LARGE_TILE_TOKENS = next(size for size in (1024, 2048, 4096) if sums_share(size) <= MAX_SUMS_SHARE)
"""The same for large weights."""
MAX_TILE_TOKENS = 8192
"""Above it more tiles cost next to nothing: the sums of large weights take less than 2 % of the time."""
LARGE_SUMS = 32 * 2**20
"""The most bytes of float32 gradient sums that are assumed to stay in the cache of a GPU (an H100 has 50 MiB)."""

Bounds = tuple[int, int]


def tile_bounds(tiling: Tiling, tokens: int, hidden_size: int, sizes: MLPSizes | None = None) -> list[Bounds]:
    """Cut tokens into tiles whose sizes differ by one token at most, the larger ones first.

    Memory that a tile frees then fits the next one. ``tile_tokens`` is the most tokens of a tile.

    ``"auto"`` uses ``ceil(12 * intermediate_size / hidden_size)`` tiles: the widest tensor of a tile is then a twelfth
    as large as the hidden states of all tokens. The six such tensors that a gated MLP holds in its backward pass are
    half as large, so the peak of a block is about what attention holds (``pytest tests/planner/test_floor.py``),
    and each further tile would cost time on the host and save little. Where the size is not known it uses
    ``ceil(tokens / hidden_size)``, as Arctic Long Sequence Training does (arXiv:2506.13996). Where the size is known no
    tile has more than :data:`MAX_TILE_TOKENS` tokens, unless it needs as many for its gradient sums.

    A mixture of experts has as many tiles as an MLP of its active ``intermediate_size``: the one with the weights that
    a token uses, which are those of ``top_k`` experts and the shared ones. But a tile sums the gradients of all
    experts, so it needs more tokens.

    With ``"auto"`` no tile has fewer than :data:`MIN_TILE_TOKENS` tokens. Where the sums are too large for the cache,
    none has fewer than :data:`LARGE_TILE_TOKENS`, nor so few that the sums take more than :data:`MAX_SUMS_SHARE` of the
    time of its arithmetic. Every tile has two or more: one does not show the layout of an output, and the compiler
    treats sizes of one apart.
    """
    return list(_bounds(tiling.tile_tokens, tiling.num_shards, tokens, hidden_size, sizes))


@lru_cache(maxsize=1024)  # each layer of each step asks for the same ones
def _bounds(
    tile_tokens: int | None,
    num_shards: int | Literal["auto"],
    tokens: int,
    hidden_size: int,
    sizes: MLPSizes | None,
) -> tuple[Bounds, ...]:
    rows = max(1, sizes.hidden // hidden_size) if sizes else 1  # a norm of each head (q_norm) has several rows a token
    if tile_tokens is not None:
        tiles = ceil(tokens / (tile_tokens * rows))
    elif num_shards == "auto":
        tiles = ceil(tokens / hidden_size)
        if sizes:
            tiles = max(ceil(12 * sizes.intermediate / sizes.hidden), ceil(tokens / (MAX_TILE_TOKENS * rows)))
        tiles = min(tiles, tokens // (_least_tokens(sizes) * rows))
    else:
        tiles = num_shards
    tiles = max(1, min(tiles, tokens // 2))
    size, larger = divmod(tokens, tiles)
    return tuple(pairwise(index * size + min(index, larger) for index in range(tiles + 1)))


def _least_tokens(sizes: MLPSizes | None) -> int:
    """Return the tokens of the smallest tile that is worth its time."""
    if sizes is None or 4 * sizes.summed <= LARGE_SUMS:
        return MIN_TILE_TOKENS
    # The share falls with the number of tokens.
    return max(LARGE_TILE_TOKENS, ceil(sums_share(1, sizes.summed, sizes.used) / MAX_SUMS_SHARE))


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


@dataclass(frozen=True)
class OutputLayout:
    """What the module returns: a tree of per-token tensors."""

    tree: pytree.TreeSpec
    flat: tuple[bool, ...]
    """Of each tensor, whether it is ``[tokens, ...]`` for hidden states ``[B, S, H]``, as of a router."""


def describe_output(output: Any, shape: TokenShape, tokens: int, module: str) -> OutputLayout:
    """Return the layout of the output of a tile with this number of tokens.

    Raises:
        NotPositionWiseError: If it returns something that has not one entry for each token.
    """
    leaves, tree = pytree.tree_flatten(output)
    flat: list[bool] = []
    for index, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, Tensor)
        if is_tensor and leaf.shape[: len(shape.lead)] == shape.tile_lead(tokens):
            flat.append(False)
        elif is_tensor and leaf.shape[:1] == (tokens,):
            flat.append(True)
        else:
            what = f"of shape {list(leaf.shape)}" if is_tensor else f"a {type(leaf).__name__}"
            raise NotPositionWiseError(
                f"{module}: output {index} ({what}) is not per token, so it would change with the tiles. {REMEDY}"
            )
    return OutputLayout(tree, tuple(flat))


class OutputAssembly:
    """Collects the tiles' outputs into tensors of the untiled shape, ``leaves``, that are allocated once."""

    def __init__(self, layout: OutputLayout, shape: TokenShape, bounds: Sequence[Bounds], module: str) -> None:
        self.layout, self.shape, self.bounds, self.module = layout, shape, bounds, module
        self.leaves: list[Tensor] = []
        self._places: list[Sequence[Tensor]] = []
        """Of each leaf, where the tiles' values go."""

    def add(self, output: Any, index: int) -> None:
        """Put the output of the tile with that index in its place."""
        leaves, tree = pytree.tree_flatten(output)
        if not self.leaves:
            self._allocate(leaves)
        if tree != self.layout.tree:
            raise self._changes()
        for tiles, leaf in zip(self._places, leaves, strict=True):
            if not isinstance(leaf, Tensor) or leaf.shape != tiles[index].shape:
                raise self._changes()
            tiles[index].copy_(leaf)

    def _changes(self) -> NotPositionWiseError:
        return NotPositionWiseError(
            f"{self.module}: the structure or the shapes of its output change from tile to tile, so it cannot be"
            f" tiled. {REMEDY}"
        )

    def _allocate(self, leaves: Sequence[Tensor]) -> None:
        # In the final shape, not as a view of another one: what a custom Function returns may be changed in place only
        # if it is no view.
        for leaf, flat in zip(leaves, self.layout.flat, strict=True):
            lead = (self.shape.tokens,) if flat else self.shape.lead
            whole = leaf.new_empty(*lead, *leaf.shape[1 if flat else len(lead) :])
            self.leaves.append(whole)
            self._places.append(tile_views(whole, flat, self.shape, self.bounds))


def tile_views(whole: Tensor, flat: bool, shape: TokenShape, bounds: Sequence[Bounds]) -> Sequence[Tensor]:
    """Return for each tile its part of an output or of its gradient, in the shape of the tile's output."""
    return whole.split(sizes_of(bounds)) if flat else shape.tiles(whole, bounds)


def gradients_of_tiles(
    gradients: Sequence[Tensor | None], layout: OutputLayout, shape: TokenShape, bounds: Sequence[Bounds]
) -> list[Iterable[Tensor | None]]:
    """Return for each leaf of an output the gradients of the tiles, given that of the whole."""
    found: list[Iterable[Tensor | None]] = []
    for whole, flat in zip(gradients, layout.flat, strict=True):
        found.append(repeat(None) if whole is None else tile_views(whole, flat, shape, bounds))
    return found


# Arguments


@dataclass(frozen=True)
class Arguments:
    """``(args, kwargs)`` without the tensors in them and in their tuples.

    Lists and dictionaries stay the caller's own objects, because a module may add to them.
    """

    tree: pytree.TreeSpec
    others: tuple[Any, ...]
    positions: tuple[int, ...]
    plain: bool
    """Whether the arguments are tensors alone, none of them by name or in a tuple."""

    def call_with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of theirs."""
        leaves = list(self.others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs

    def call(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Call a function with other tensors in place of theirs."""
        if self.plain:
            return function(*tensors)
        args, kwargs = self.call_with(tensors)
        return function(*args, **kwargs)

    def refuse_gradients_inside(self, module: str) -> None:
        """Refuse tensors that want a gradient inside lists and dictionaries, because they would get none.

        Raises:
            NotPositionWiseError: If there is one, and gradients are on.
        """
        containers = [leaf for leaf in self.others if isinstance(leaf, list | dict)]
        if containers and torch.is_grad_enabled():
            tensors = (leaf for leaf in pytree.tree_leaves(containers) if isinstance(leaf, Tensor))
            if any(t.requires_grad for t in tensors):
                raise NotPositionWiseError(
                    f"{module} was given a tensor that requires a gradient inside a list or a dictionary, and it would"
                    f" get none. Pass it as an argument of its own, or in a tuple. {REMEDY}"
                )


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Arguments]:
    """Return the tensors, and what is needed to call with others."""
    if not kwargs and set(map(type, args)) <= _PLAIN:
        return list(args), _plain_arguments(len(args))
    whole = (args, kwargs)
    leaves, tree = pytree.tree_flatten(whole, is_leaf=lambda node: node is not kwargs and not isinstance(node, tuple))
    tensors: list[Tensor] = []
    positions: list[int] = []
    others: list[Any] = []
    for position, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, Tensor)
        others.append(None if is_tensor else leaf)
        if is_tensor:
            tensors.append(leaf)
            positions.append(position)
    return tensors, Arguments(tree, tuple(others), tuple(positions), plain=False)


_PLAIN = {Tensor, torch.nn.Parameter}


@cache
def _plain_arguments(count: int) -> Arguments:
    """Return those of a call with so many tensors and nothing else."""
    tree = pytree.tree_structure(((0,) * count, {}))
    return Arguments(tree, (None,) * count, tuple(range(count)), plain=True)
