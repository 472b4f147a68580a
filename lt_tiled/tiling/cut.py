"""How a call is cut into tiles, and how the outputs of tiles go together in the untiled order and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""The first token of a tile, and the first one behind it."""


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


T = TypeVar("T")
tiles_to_run: ContextVar[Callable[[Iterable[Any]], Iterable[Any]]] = ContextVar("tiles_to_run")
"""Set by a simulation, for its own thread: takes rows, one for each tile, and returns those of the tiles to run."""


def each_tile(rows: Iterable[T]) -> Iterable[T]:
    """Return all rows, one for each tile; in a simulation, only those that it runs."""
    choose = tiles_to_run.get(None)
    return rows if choose is None else choose(rows)


def memory_order(tensor: Tensor) -> list[int] | None:
    """Return the order of dimensions in which a tensor is contiguous, if it is another one that keeps the last."""
    if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if order[-1] == tensor.dim() - 1 and tensor.permute(order).is_contiguous() else None


@dataclass(frozen=True)
class Tokens:
    """The leading dimensions of the hidden states, ``[B, S]`` of ``[B, S, H]``: one entry per token, row by row."""

    lead: torch.Size

    @cached_property
    def count(self) -> int:
        """The number of tokens."""
        return prod(self.lead)

    def cover(self, tensor: Tensor) -> bool:
        """Whether a tensor has an entry for each token."""
        return tensor.shape[: len(self.lead)] == self.lead

    def tile_lead(self, tokens: int) -> tuple[int, ...]:
        """Return the leading dimensions of a tile: ``[1, t]`` for hidden states ``[B, S, H]``, ``[B, S]`` for all."""
        return tuple(self.lead) if tokens == self.count else (1,) * (len(self.lead) - 1) + (tokens,)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return ``[B, S, ...]`` as ``[tokens, ...]``: a view where the strides allow it."""
        return tensor.reshape(self.count, *tensor.shape[len(self.lead) :])

    def few(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the first tokens of ``[B, S, ...]`` as the module sees a tile of them."""
        return self.flatten(tensor)[:tokens].reshape(*self.tile_lead(tokens), *tensor.shape[len(self.lead) :])

    def tiles(self, whole: Tensor, bounds: Sequence[Bounds]) -> Sequence[Tensor]:
        """Return each tile of ``[B, S, ...]`` as the module sees it: a view where the strides allow it."""
        if len(bounds) == 1:  # in its own layout
            return [whole.view_as(whole)]
        flat, size = self.flatten(whole), bounds[0][1]
        last = bounds[-1][1] - bounds[-1][0]
        # Tiles of the first size come first, then those of the last.
        first = len(bounds) if size == last else (self.count - last * len(bounds)) // (size - last)
        # Not of one dimension of all tokens: with its strides torch's matmul would copy the weights for each tile.
        lead, rest = (1,) * (len(self.lead) - 1), flat.shape[1:]
        found = flat[: first * size].view(first, *lead, size, *rest).unbind()
        if first == len(bounds):
            return found
        return [*found, *flat[first * size :].view(len(bounds) - first, *lead, last, *rest).unbind()]


_LEAF = pytree.tree_structure(0)


class Assembly:
    """Collects the tiles' outputs into tensors of the untiled shape, ``wholes``, that are allocated once.

    After the forward pass its layout is used once more, for the outputs' gradients.
    """

    def __init__(self, tokens: Tokens, bounds: Sequence[Bounds], name: str) -> None:
        self.tokens, self.bounds, self.name = tokens, bounds, name
        self.tree: pytree.TreeSpec | None = None
        self.flat: list[bool] = []
        """Of each output, whether it is ``[tokens, ...]`` for hidden states ``[B, S, H]``, as of a router."""
        self.wholes: list[Tensor] = []
        self._tiles: list[Sequence[Tensor]] = []
        """Of each output, where the tiles' values go."""

    def add(self, index: int, output: Any) -> None:
        """Put the output of a tile into its place.

        Raises:
            NotPositionWiseError: If it is not per token, or its structure is not that of the first tile's.
        """
        leaves, tree = ([output], _LEAF) if isinstance(output, Tensor) else pytree.tree_flatten(output)
        if self.tree is None:
            self._allocate(leaves, tree)
        if tree is not self.tree and tree != self.tree:
            raise self._changes()
        for tiles, leaf in zip(self._tiles, leaves, strict=True):
            if not isinstance(leaf, Tensor) or leaf.shape != tiles[index].shape:
                raise self._changes()
            tiles[index].copy_(leaf)

    def _allocate(self, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
        size, lead = self.bounds[0][1] - self.bounds[0][0], self.tokens.lead
        for index, leaf in enumerate(leaves):
            self.flat.append(self._is_flat(index, leaf, size))
            shape = (self.tokens.count, *leaf.shape[1:]) if self.flat[-1] else (*lead, *leaf.shape[len(lead) :])
            # In the final shape, not as a view: what a Function returns may be changed in place only if it is none.
            self.wholes.append(leaf.new_empty(shape))
            self._tiles.append(self._cut(self.wholes[-1], self.flat[-1]))
        self.tree = tree

    def _is_flat(self, index: int, leaf: Any, size: int) -> bool:
        if isinstance(leaf, Tensor) and leaf.shape[: len(self.tokens.lead)] == self.tokens.tile_lead(size):
            return False
        if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,):
            return True
        what = f"of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise NotPositionWiseError(
            f"{self.name}: output {index} ({what}) is not per token, so it would change with the tiles. {REMEDY}"
        )

    def _changes(self) -> NotPositionWiseError:
        return NotPositionWiseError(
            f"{self.name}: the structure or the shapes of its output change from tile to tile, so it cannot be tiled."
            f" {REMEDY}"
        )

    def _cut(self, whole: Tensor, flat: bool) -> Sequence[Tensor]:
        return whole.split([high - low for low, high in self.bounds]) if flat else self.tokens.tiles(whole, self.bounds)

    def take(self) -> tuple[tuple[Tensor, ...], pytree.TreeSpec]:
        """Return the outputs and how they go together, and keep none of them."""
        assert self.tree is not None
        wholes, self.wholes, self._tiles = tuple(self.wholes), [], []
        return wholes, self.tree

    def gradients(self, given: Sequence[Tensor | None]) -> Iterator[tuple[Tensor | None, ...]]:
        """Yield for each tile the gradients of its outputs, from those of the whole ones."""
        columns: list[Iterable[Tensor | None]] = []
        for whole, flat in zip(given, self.flat, strict=True):
            columns.append(repeat(None, len(self.bounds)) if whole is None else self._cut(whole, flat))
        return zip(*columns, strict=True)
