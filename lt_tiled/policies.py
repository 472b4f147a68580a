"""What a user sets: the frozen dataclasses that Python calls and YAML files fill in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lt_tiled._types import PositiveInt


@dataclass(frozen=True)
class Tiling:
    """Which modules run tile by tile, and how.

    Raises:
        ValueError: If a count is not positive, or both counts are given, or a reduction is unknown.
    """

    num_shards: PositiveInt | Literal["auto"] = "auto"
    """Tiles per call. ``"auto"`` uses ``ceil(tokens / hidden)`` tiles of at least 1024 tokens each, and one tile for
    short inputs."""
    tile_tokens: PositiveInt | None = None
    """Tokens per tile: the other way to say it. Give this or ``num_shards``, not both."""
    targets: str | Sequence[str] = "auto"
    """``"auto"`` (the feed-forward part of every block), or class names and path globs (``model.layers.*.mlp``)."""
    accumulate: Literal["float32", "param"] = "float32"
    """The dtype in which the weight gradients of 16-bit weights are summed over the tiles: ``"param"`` saves the float32
    buffer and lets the rounding error grow with the number of tiles."""
    self_check: bool = True
    """Run a few tokens of the first tiled input whole and in tiles, and refuse a module whose results differ."""
    reductions: Mapping[str, Literal["sum", "mean"]] | None = None
    """For outputs that are not per token, by their name in the output (``"[1]"``, ``"['aux']"``): how to put the tiles'
    values together. ``"mean"`` weighs each tile by its tokens. Without an entry such an output is refused."""

    def __post_init__(self) -> None:
        _check_count("num_shards", self.num_shards, also="auto")
        _check_count("tile_tokens", self.tile_tokens, also=None)
        if self.num_shards != "auto" and self.tile_tokens is not None:
            raise ValueError(
                f"num_shards={self.num_shards} and tile_tokens={self.tile_tokens} are two ways to say the same thing: give only one."
            )
        _check_choice("accumulate", self.accumulate, ("float32", "param"))
        for name, reduction in (self.reductions or {}).items():
            _check_choice(f"reductions[{name!r}]", reduction, ("sum", "mean"))
        _check_targets(self.targets)


@dataclass(frozen=True)
class Checkpointing:
    """Which blocks keep only their inputs for the backward and are recomputed there.

    Raises:
        ValueError: If ``targets`` is empty.
    """

    targets: str | Sequence[str] = "auto"
    """``"auto"`` (the repeated layers of the model), or class names and path globs (``model.layers.*``)."""

    def __post_init__(self) -> None:
        _check_targets(self.targets)


def as_tiling(value: int | Tiling | None) -> Tiling | None:
    """Read the short form of strategies: a bare number is a shard count, ``None`` turns tiling off."""
    if value is None or isinstance(value, Tiling):
        return value
    return Tiling(num_shards=value)


def as_checkpointing(value: bool | Checkpointing | None) -> Checkpointing | None:
    """Read the short form of strategies: ``True`` is the default policy, ``False`` and ``None`` turn it off."""
    if value is None or isinstance(value, Checkpointing):
        return value
    if not isinstance(value, bool):
        raise ValueError(f"checkpointing={value!r} is not understood: give True, False or a Checkpointing(...).")
    return Checkpointing() if value else None


def _check_count(name: str, value: object, also: object) -> None:
    if value == also:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be {also!r} or a whole number of at least 1.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _check_targets(targets: str | Sequence[str]) -> None:
    names = [targets] if isinstance(targets, str) else targets
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f'targets={targets!r} must be "auto", or at least one class name or path glob.')
