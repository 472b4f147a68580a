"""How a call is cut into tiles, and how the outputs of tiles go together in the untiled order and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.policies import Tiling

MIN_TILE_TOKENS = 1024
"""Below this many rows a matrix multiply is too thin to be efficient; ``num_shards="auto"`` never goes below it."""
LARGE_TILE_TOKENS = 4096
"""The least tokens of a tile where the gradient sums are large."""
SUM_TOKENS = 2400
"""With so many tokens a tile's sums take an H100 5 % of the time of its arithmetic: of each element that a token uses
the sum is read and written, 8 bytes at 3.35 TB/s, and each token takes 8 FLOPs at 400 TFLOP/s."""
MAX_TILE_TOKENS = 8192
"""Above it more tiles cost next to nothing: the sums of large weights take less than 2 % of the time."""
LARGE_SUMS = 32 * 2**20
"""The most bytes of float32 gradient sums that are assumed to stay in the cache of a GPU (an H100 has 50 MiB)."""


def tile_sizes(tiling: Tiling, tokens: int, hidden_size: int, sizes: MLPSizes | None = None) -> list[int]:
    """Cut tokens into tiles whose sizes differ by one token at most, the larger ones first; return their tokens.

    Memory that a tile frees then fits the next one. ``tile_tokens`` is the most tokens of a tile.

    ``"auto"`` uses ``ceil(12 * intermediate_size / hidden_size)`` tiles: the widest tensor of a tile is then a twelfth
    as large as the hidden states of all tokens, and the peak of a block about what attention holds (``pytest
    tests/planner/test_floor.py``). Each further tile would cost time on the host and save little. Of a mixture of
    experts, ``intermediate_size`` is that of an MLP with the weights that a token uses. Where the sizes are not known
    it uses ``ceil(tokens / hidden_size)``, as Arctic Long Sequence Training does (arXiv:2506.13996).

    A tile has at most :data:`MAX_TILE_TOKENS` tokens and at least :data:`MIN_TILE_TOKENS`. Where the gradient sums,
    of a mixture those of all experts, are too large for the cache, it has :data:`LARGE_TILE_TOKENS` and as many more as
    keep the sums below 5 % of its time. No tile has a single token: it would not show the layout of an output, and the
    compiler treats sizes of one apart.
    """
    hidden = hidden_size
    if sizes:
        hidden = max(hidden, sizes.hidden)
    rows = hidden // hidden_size  # a norm of each head (q_norm) has several rows a token
    if tiling.tile_tokens is not None:
        tiles = ceil(tokens / (tiling.tile_tokens * rows))
    elif tiling.num_shards != "auto":
        tiles = tiling.num_shards
    elif sizes is None:
        tiles = min(ceil(tokens / hidden), tokens // MIN_TILE_TOKENS)
    else:
        # 1. The widest tensor, and the most tokens.
        intermediate = sizes.used / (3 * hidden)  # three weights, as a gated MLP has
        tiles = max(ceil(12 * intermediate / hidden), ceil(tokens / (MAX_TILE_TOKENS * rows)))
        # 2. The least tokens. An MLP sums all that a token uses; of a mixture of experts a token uses a part.
        least = MIN_TILE_TOKENS
        if 4 * sizes.summed > LARGE_SUMS:
            least = max(LARGE_TILE_TOKENS, ceil(SUM_TOKENS * sizes.summed / sizes.used))
        tiles = min(tiles, tokens // (least * rows))
    tiles = max(1, min(tiles, tokens // 2))
    size, larger = divmod(tokens, tiles)
    return [size + 1] * larger + [size] * (tiles - larger)


tiles_to_run: ContextVar[Callable[[Iterable[Any]], Iterable[Any]]] = ContextVar("tiles_to_run")
"""Set by a simulation, for its own thread: takes rows, one for each tile, and returns those of the tiles to run."""


def each_tile(rows: Iterable[Any]) -> Iterable[Any]:
    """Return all rows, one for each tile; in a simulation, only those that it runs."""
    return tiles_to_run.get(iter)(rows)


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

    def tiles(self, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return each tile of ``[B, S, ...]`` as the module sees it: a view where the strides allow it."""
        flat = whole.reshape(torch.Size([self.count]) + whole.shape[len(self.lead) :])
        ones = (1,) * (len(self.lead) - 1)
        found: list[Tensor] = []
        for part in flat.split(sizes):
            # With the strides of a tensor of this size: with others torch's matmul would copy the weights.
            found.append(part.view(*ones, *part.shape))
        return found


class Assembly:
    """Collects the tiles' outputs into tensors of the untiled shape, ``wholes``, which are allocated once.

    An output is ``[B, S, ...]`` as the hidden states, or ``[tokens, ...]``, as of a router.
    """

    def __init__(self, tokens: Tokens, sizes: Sequence[int], name: str) -> None:
        self.tokens = tokens
        self.sizes = sizes
        self.name = name
        self.tree: Any = None
        """How outputs go together."""
        self.wholes: list[Tensor] = []
        self._tiles: list[Sequence[Tensor]] = []
        """Of each output, where the tiles' values go."""

    def whole_shape(self, index: int, leaf: Any) -> torch.Size:
        """Return the untiled shape of an output, given that of the first tile.

        Raises:
            NotPositionWiseError: If it is not per token.
        """
        lead = self.tokens.lead
        size = self.sizes[0]
        what = f"a {type(leaf).__name__}"
        if isinstance(leaf, Tensor):
            if leaf.shape[: len(lead)] == torch.Size([1] * (len(lead) - 1) + [size]):
                return lead + leaf.shape[len(lead) :]
            if leaf.shape[:1] == (size,):
                return torch.Size([self.tokens.count]) + leaf.shape[1:]
            what = f"of shape {list(leaf.shape)}"
        raise NotPositionWiseError(
            f"{self.name}: output {index} ({what}) is not per token, so it would change with the tiles. {REMEDY}"
        )

    def add(self, index: int, output: Any) -> None:
        """Put the output of a tile into its place.

        Raises:
            NotPositionWiseError: If it is not like that of the first tile.
        """
        leaves, tree = pytree.tree_flatten(output)
        if index == 0:
            self.tree = tree
            for place, leaf in enumerate(leaves):
                # In the final shape, not as a view: what a Function returns may be changed in place only if it is none.
                whole = leaf.new_empty(self.whole_shape(place, leaf))
                self.wholes.append(whole)
                self._tiles.append(self._cut(whole))
        same = tree == self.tree
        for tiles, leaf in zip(self._tiles, leaves, strict=False):
            same = same and isinstance(leaf, Tensor) and leaf.shape == tiles[index].shape
            if same:
                tiles[index].copy_(leaf)
        if not same:
            raise NotPositionWiseError(
                f"{self.name}: the structure or the shapes of its output change from tile to tile, so it cannot be"
                f" tiled. {REMEDY}"
            )

    def _cut(self, whole: Tensor) -> Sequence[Tensor]:
        return self.tokens.tiles(whole, self.sizes) if self.tokens.cover(whole) else whole.split(self.sizes)

    def gradients(self, given: Sequence[Tensor | None]) -> Iterator[tuple[Tensor | None, ...]]:
        """Yield for each tile the gradients of its outputs, from those of the whole ones."""
        columns: list[Iterable[Tensor | None]] = []
        for whole in given:
            columns.append(repeat(None, len(self.sizes)) if whole is None else self._cut(whole))
        return zip(*columns, strict=True)
