"""How a call is cut into tiles, and how the outputs of tiles go together in the untiled order and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from math import ceil, prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.policies import Tiling

MIN_TILE_TOKENS = 1024
"""Below this many rows a matrix multiply is too thin to be efficient; ``num_shards="auto"`` never goes below it."""
SUM_TOKENS = (8 / 3.35e12) / (8 / 400e12)
"""The tokens whose arithmetic takes an H100 as long as a gradient sum: for each element a tile reads and writes the
float32 sum, 8 bytes at 3.35 TB/s, and for each that a token uses it takes 8 FLOPs at 400 TFLOP/s."""
MAX_SUMS_SHARE = 0.05
"""The largest time for sums relative to arithmetic with ``num_shards="auto"``."""
LARGE_TILE_TOKENS = 4096
"""The least tokens where weights are large: the first power of two that keeps to this share."""
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
    as large as the hidden states of all tokens, and the peak of a block about what attention holds (``pytest
    tests/planner/test_floor.py``). Each further tile would cost time on the host and save little. Of a mixture of
    experts, ``intermediate_size`` is that of an MLP with the weights that a token uses. Where the sizes are not known
    it uses ``ceil(tokens / hidden_size)``, as Arctic Long Sequence Training does (arXiv:2506.13996).

    A tile has at most :data:`MAX_TILE_TOKENS` tokens and at least :data:`MIN_TILE_TOKENS`. Where the gradient sums,
    of a mixture those of all experts, are too large for the cache, it has :data:`LARGE_TILE_TOKENS` and as many more as
    keep the sums at :data:`MAX_SUMS_SHARE` of its time. No tile has a single token: it would not show the layout of an
    output, and the compiler treats sizes of one apart.
    """
    hidden = hidden_size
    if sizes:
        hidden = max(hidden, sizes.hidden)
    rows = hidden // hidden_size  # a norm of each head (q_norm) has several rows a token
    if tiling.tile_tokens is not None:
        tiles = ceil(tokens / (tiling.tile_tokens * rows))
    elif tiling.num_shards == "auto":
        tiles = ceil(tokens / hidden_size)
        if sizes:
            tiles = max(ceil(4 * sizes.used / hidden**2), ceil(tokens / (MAX_TILE_TOKENS * rows)))
        tiles = min(tiles, tokens // (_least_tokens(sizes) * rows))
    else:
        tiles = tiling.num_shards
    tiles = max(1, min(tiles, tokens // 2))
    size, larger = divmod(tokens, tiles)
    return list(pairwise([index * size + min(index, larger) for index in range(tiles + 1)]))


def _least_tokens(sizes: MLPSizes | None) -> int:
    """Return the tokens of the smallest tile that is worth its time."""
    if sizes is None or 4 * sizes.summed <= LARGE_SUMS:
        return MIN_TILE_TOKENS
    # An MLP uses what it sums; a mixture of experts uses a part of it.
    return max(LARGE_TILE_TOKENS, ceil(SUM_TOKENS * sizes.summed / sizes.used / MAX_SUMS_SHARE))


T = TypeVar("T")
tiles_to_run: ContextVar[Callable[[Iterable[Any]], Iterable[Any]]] = ContextVar("tiles_to_run")
"""Set by a simulation, for its own thread: takes rows, one for each tile, and returns those of the tiles to run."""


def each_tile(rows: Iterable[T]) -> Iterable[T]:
    """Return all rows, one for each tile; in a simulation, only those that it runs."""
    choose = tiles_to_run.get(None)
    return rows if choose is None else choose(rows)


@dataclass(frozen=True)
class Tokens:
    """The leading dimensions of the hidden states, ``[B, S]`` of ``[B, S, H]``: one entry per token, row by row."""

    lead: torch.Size

    @cached_property
    def count(self) -> int:
        return prod(self.lead)

    def cover(self, tensor: Tensor) -> bool:
        """Whether a tensor has an entry for each token."""
        return tensor.shape[: len(self.lead)] == self.lead

    def tiles(self, whole: Tensor, bounds: Sequence[Bounds]) -> Sequence[Tensor]:
        """Return each tile of ``[B, S, ...]`` as the module sees it: a view where the strides allow it."""
        if len(bounds) == 1:  # in its own layout
            return [whole.view_as(whole)]
        flat = whole.reshape(torch.Size([self.count]) + whole.shape[len(self.lead) :])
        size = bounds[0][1]
        last = bounds[-1][1] - bounds[-1][0]
        # Tiles of the first size come first, then those of the last. Two operations cut them, however many there are.
        first = len(bounds)
        if size != last:
            first = (self.count - last * len(bounds)) // (size - last)
        # Not of one dimension of all tokens: with its strides torch's matmul would copy the weights for each tile.
        lead = (1,) * (len(self.lead) - 1)
        found = flat[: first * size].view(first, *lead, size, *flat.shape[1:]).unbind()
        if first < len(bounds):
            found += flat[first * size :].view(-1, *lead, last, *flat.shape[1:]).unbind()
        return found


_LEAF = pytree.tree_structure(0)


def flatten(output: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a tile's output, and how they go together."""
    if isinstance(output, Tensor):
        return [output], _LEAF
    return pytree.tree_flatten(output)


@dataclass(frozen=True)
class Layout:
    """How the outputs of tiles go together."""

    tree: pytree.TreeSpec
    flat: tuple[bool, ...]
    """Of each output, whether it is ``[tokens, ...]`` for hidden states ``[B, S, H]``, as of a router."""

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: pytree.TreeSpec, tokens: Tokens, size: int, name: str) -> Layout:
        """Return that of a tile of so many tokens.

        Raises:
            NotPositionWiseError: If an output is not per token.
        """
        lead = tokens.lead
        if size < tokens.count:
            lead = torch.Size([1] * (len(lead) - 1) + [size])
        flat: list[bool] = []
        for index, leaf in enumerate(leaves):
            whole = isinstance(leaf, Tensor) and leaf.shape[: len(lead)] == lead
            if not whole and not (isinstance(leaf, Tensor) and leaf.shape[:1] == (size,)):
                what = f"of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise NotPositionWiseError(
                    f"{name}: output {index} ({what}) is not per token, so it would change with the tiles. {REMEDY}"
                )
            flat.append(not whole)
        return cls(tree, tuple(flat))


class Assembly:
    """Collects the tiles' outputs into tensors of the untiled shape, ``wholes``, which are allocated once."""

    def __init__(self, tokens: Tokens, bounds: Sequence[Bounds], name: str, layout: Layout) -> None:
        self.tokens = tokens
        self.bounds = bounds
        self.name = name
        self.layout = layout
        self.wholes: list[Tensor] = []
        self._tiles: list[Sequence[Tensor]] = []
        """Of each output, where the tiles' values go."""

    def add(self, index: int, output: Any) -> None:
        """Put the output of a tile into its place.

        Raises:
            NotPositionWiseError: If it is not like that of the first tile.
        """
        leaves, tree = flatten(output)
        if index == 0:
            self._allocate(leaves)
        same = tree == self.layout.tree
        for tiles, leaf in zip(self._tiles, leaves, strict=False):
            same = same and isinstance(leaf, Tensor) and leaf.shape == tiles[index].shape
            if same:
                tiles[index].copy_(leaf)
        if not same:
            raise NotPositionWiseError(
                f"{self.name}: the structure or the shapes of its output change from tile to tile, so it cannot be"
                f" tiled. {REMEDY}"
            )

    def _allocate(self, outputs: Sequence[Tensor]) -> None:
        lead = self.tokens.lead
        for output, flat in zip(outputs, self.layout.flat, strict=False):  # another number of them is refused
            shape = lead + output.shape[len(lead) :]
            if flat:
                shape = torch.Size([self.tokens.count]) + output.shape[1:]
            # In the final shape, not as a view: what a Function returns may be changed in place only if it is none.
            self.wholes.append(output.new_empty(shape))
            self._tiles.append(self._cut(self.wholes[-1], flat))

    def _cut(self, whole: Tensor, flat: bool) -> Sequence[Tensor]:
        return whole.split([high - low for low, high in self.bounds]) if flat else self.tokens.tiles(whole, self.bounds)

    def gradients(self, given: Sequence[Tensor | None]) -> Iterator[tuple[Tensor | None, ...]]:
        """Yield for each tile the gradients of its outputs, from those of the whole ones."""
        columns: list[Iterable[Tensor | None]] = []
        for whole, flat in zip(given, self.layout.flat, strict=True):
            columns.append(repeat(None, len(self.bounds)) if whole is None else self._cut(whole, flat))
        return zip(*columns, strict=True)
