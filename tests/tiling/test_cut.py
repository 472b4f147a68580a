"""How many tiles a call is cut into."""

from __future__ import annotations

import pytest

from lt_tiled import Tiling
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.tiling.cut import LARGE_TILE_TOKENS, MIN_TILE_TOKENS, SUM_TOKENS, tile_sizes


@pytest.mark.parametrize(
    ("tokens", "hidden", "tiles"),
    [
        (131072, 4096, 32),  # ceil(tokens / hidden)
        (131073, 4096, 33),
        (5000, 4096, 2),
        (4096, 128, 4),  # the floor of 1024 tokens a tile
        (4097, 128, 4),  # evenly, instead of a fifth tile with one token
        (2047, 64, 1),  # short: untiled
        (1024, 4096, 1),
        (1, 4096, 1),
        (0, 4096, 1),
    ],
)
def test_auto(tokens: int, hidden: int, tiles: int) -> None:
    """``auto`` cuts by the ALST rule where no width is known, never below the efficient size, and leaves short inputs
    whole.
    """
    sizes = tile_sizes(Tiling(), tokens, hidden)
    assert len(sizes) == tiles
    if tiles > 1:
        assert sizes[0] >= MIN_TILE_TOKENS


@pytest.mark.parametrize(
    ("tokens", "wide", "tiles"),
    [(2**18, 14336, 42), (2**20, 14336, 128), (2**18, 16384, 48), (12000, 14336, 2), (5000, 14336, 1)],
)
def test_auto_where_the_width_is_known(tokens: int, wide: int, tiles: int) -> None:
    """``auto`` makes the widest tensor of an MLP's tile a twelfth as large as the hidden states, with at most 8192
    tokens a tile, and at least 4096 for large weights.
    """
    sizes = tile_sizes(Tiling(), tokens, 4096, MLPSizes.dense(4096, wide))
    assert len(sizes) == tiles
    if tokens >= 42 * LARGE_TILE_TOKENS:
        assert 12 * (sizes[0] - 1) * wide <= tokens * 4096


def mixture(hidden: int, intermediate: int, experts: int, top_k: int) -> MLPSizes:
    """The sizes of a mixture of gated experts, without its router."""
    expert = 3 * hidden * intermediate
    return MLPSizes(experts * expert, top_k * expert, hidden)


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        (mixture(4096, 14336, experts=8, top_k=2), 13),  # Mixtral 8x7B
        (mixture(2048, 768, experts=128, top_k=8), 3),  # Qwen3 30B A3B
        (mixture(2880, 2880, experts=32, top_k=4), 6),  # GPT-OSS 20B
        (mixture(7168, 2048, experts=256, top_k=8), 1),  # DeepSeek V3: 76,418 tokens would not make two tiles
        (MLPSizes(summed=0, used=3 * 2048 * 6144, hidden=2048), 36),  # frozen: as many as an MLP has
    ],
)
def test_auto_for_experts(sizes: MLPSizes, tiles: int) -> None:
    """A tile sums the gradients of all experts, which takes at most 5 % of the time of its arithmetic."""
    of_tiles = tile_sizes(Tiling(), 131072, sizes.hidden, sizes)
    assert len(of_tiles) == tiles
    assert SUM_TOKENS * sizes.summed / sizes.used <= of_tiles[-1]
    if sizes.summed:  # one more tile would be too small
        assert SUM_TOKENS * sizes.summed / sizes.used > 131072 // (tiles + 1)


def test_auto_for_small_weights() -> None:
    """Where the gradient sums of an MLP or of all experts fit into a GPU's cache, tiles may be smaller."""
    assert len(tile_sizes(Tiling(), 32768, 768, MLPSizes.dense(768, 3072))) == 32
    assert len(tile_sizes(Tiling(), 32768, 2048, MLPSizes.dense(2048, 8192))) == 8
    assert len(tile_sizes(Tiling(), 32768, 1024, MLPSizes.dense(1024, 4096))) == 8  # 48 MiB of sums
    assert len(tile_sizes(Tiling(), 32768, 256, mixture(256, 512, experts=16, top_k=4))) == 32


@pytest.mark.parametrize("tiling", [Tiling(), Tiling(tile_tokens=4096), Tiling(64)])
def test_a_norm_of_each_head_has_the_tiles_of_its_block(tiling: Tiling) -> None:
    """A norm on ``[B, S, heads, head_dim]`` runs in as many tiles as one on ``[B, S, hidden_size]``."""
    tokens, sizes = 2**18, MLPSizes.dense(4096, 4096)
    whole, of_heads = tile_sizes(tiling, tokens, 4096, sizes), tile_sizes(tiling, 32 * tokens, 128, sizes)
    assert len(of_heads) == len(whole) > 1


@pytest.mark.parametrize("tiling", [Tiling(7), Tiling(tile_tokens=13), Tiling(1000), Tiling(tile_tokens=1), Tiling()])
@pytest.mark.parametrize("tokens", [1, 2, 3, 36, 37, 5000])
def test_tiles_cover_each_token_once(tiling: Tiling, tokens: int) -> None:
    """Each token is in a tile. Their sizes differ by one token at most, the larger ones come first, and each has two
    tokens or more.
    """
    sizes = tile_sizes(tiling, tokens, 64)
    assert sum(sizes) == tokens
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - 1 <= sizes[-1]
    assert min(2, tokens) <= sizes[-1]


def test_counts_mean_what_they_say() -> None:
    """``num_shards`` is a number of tiles, ``tile_tokens`` the most tokens of one."""
    assert [len(tile_sizes(Tiling(8), tokens, 64)) for tokens in (4096, 100, 17, 16)] == [8] * 4
    assert tile_sizes(Tiling(tile_tokens=1000), 2500, 64) == [834, 833, 833]
