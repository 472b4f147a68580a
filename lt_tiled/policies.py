"""What a user sets: the frozen dataclasses that Python calls and YAML files fill in."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from lt_tiled._types import NonNegativeInt, PositiveInt

Tiers = Literal["cpu", "disk", "cpu+disk"]
LossShards = int | Literal["auto"]
"""Tiles of a loss."""


class CompileOptions(TypedDict, total=False):
    """Arguments of ``torch.compile``."""

    fullgraph: bool
    dynamic: bool | None
    backend: Any
    mode: str | None
    options: dict[str, Any] | None


@dataclass(frozen=True)
class Tiling:
    """Which modules run tile by tile, and how.

    Raises:
        ValueError: If a count is not positive, or both counts are given, or a reduction is unknown.
    """

    num_shards: PositiveInt | Literal["auto"] = "auto"
    """Tiles per call. ``"auto"`` uses as many as lower the peak, ``ceil(4 * wide / hidden)`` of a feed-forward part, of
    at least 1024 tokens each, and one tile for short inputs."""
    tile_tokens: PositiveInt | None = None
    """Tokens per tile: the other way to say it. Give this or ``num_shards``, not both."""
    targets: str | Sequence[str] | Callable[[str, Any], bool] = "auto"
    """``"auto"`` (the feed-forward part of every block), or class names and path globs (``model.layers.*.mlp``) of
    modules and of their methods (``BertLayer.feed_forward_chunk``), or a list of these. In Python also a function of a
    module's path and the module that says whether to tile it. An empty list tiles no module, for who wants ``loss``
    alone."""
    accumulate: Literal["float32", "param"] = "float32"
    """The dtype in which the weight gradients of 16-bit weights are summed over the tiles: ``"param"`` saves the
    float32 buffer and lets the rounding error grow with the number of tiles."""
    self_check: bool = True
    """Run a few tokens of the first tiled input whole and in tiles, and refuse a module whose results differ."""
    reductions: Mapping[str, Literal["sum", "mean"]] | None = None
    """For outputs that are not per token, by their name in the output (``"[1]"``, ``"['aux']"``): how to put the tiles'
    values together. ``"mean"`` weighs each tile by its tokens. Without an entry such an output is refused."""
    compile: bool | CompileOptions = False
    """Compile what runs on a tile, forward and backward: ``True``, or arguments of ``torch.compile`` such as ``{mode:
    max-autotune}``."""
    loss: bool | PositiveInt = False
    """Compute the loss of models of transformers that are called with labels in tiles, so that their logits are never
    whole: ``True`` for tiles of a fixed size in bytes, or how many tiles. The output's ``logits`` are absent then."""

    def __post_init__(self) -> None:
        _check_count("num_shards", self.num_shards, "auto")
        _check_count("tile_tokens", self.tile_tokens, None)
        if self.num_shards != "auto" and self.tile_tokens is not None:
            raise ValueError(
                f"num_shards={self.num_shards} and tile_tokens={self.tile_tokens} are two ways to say the same thing: give only one."
            )
        _check_choice("accumulate", self.accumulate, ("float32", "param"))
        for name, reduction in (self.reductions or {}).items():
            _check_choice(f"reductions[{name!r}]", reduction, ("sum", "mean"))
        check_compile(self.compile, "compile")
        _check_count("loss", self.loss, False, True)
        if self.loss is not False:
            warnings.warn(
                "Tiling(loss=...) is deprecated: pass loss= beside tiling=, to the strategy or to lt_tiled.prepare.",
                DeprecationWarning,
                stacklevel=3,
            )
        if callable(self.targets) or self.targets or not self.loss:
            _check_targets(self.targets, also=", or with loss=True an empty list")


@dataclass(frozen=True)
class Checkpointing:
    """Which blocks keep only their inputs for the backward and are recomputed there, and where those inputs wait.

    Raises:
        ValueError: If a value is out of bounds, or says where to offload to while nothing is offloaded there.
    """

    targets: str | Sequence[str] | Callable[[str, Any], bool] = "auto"
    """``"auto"`` (the repeated layers of the model), or class names and path globs (``model.layers.*``). In Python also
    a function of a module's path and the module."""
    offload: Tiers | None = None
    """Where the blocks' inputs go: page-locked RAM, a file, RAM and what it has no room for to a file, or nowhere."""
    directory: str | None = None
    """A directory on the disk to use, the system's directory for temporary files by default. Nothing is left in it."""
    cpu_budget: int | str | None = None
    """RAM for one node, shared by its ranks: bytes, or a text such as ``"32GiB"``. By default half of what is free."""
    disk_budget: int | str | None = None
    """Disk space for one node, shared by its ranks and reserved when training begins. By default the file grows as it
    needs."""
    prefetch: PositiveInt | Literal["auto"] = "auto"
    """How many inputs are on their way back at once; ``"auto"`` looks one further ahead after each stall."""
    keep_last: NonNegativeInt = 1
    """The inputs of this many last blocks stay, because the backward asks for them first."""
    min_bytes: int | str = "1MiB"
    """Smaller tensors stay."""
    select: str | Sequence[str | int] = "auto"
    """Which inputs of a block move: ``"auto"`` (the hidden states), or names and positions of its arguments."""
    checksum: bool = False
    """Compare a checksum of what comes back from disk."""
    compress: bool = False
    """Send float32 as bfloat16: half the bytes, and results that are no longer bit for bit the same."""
    direct_io: bool = True
    """Bypass the page cache where the filesystem allows it."""
    activations: Literal["inputs", "all"] = "inputs"
    """``"all"`` recomputes nothing and offloads every large tensor that a block saves: for short models on fast
    links."""

    def __post_init__(self) -> None:
        _check_targets(self.targets)
        _check_choice("offload", self.offload, (None, "cpu", "disk", "cpu+disk"))
        _check_choice("activations", self.activations, ("inputs", "all"))
        _check_count("prefetch", self.prefetch, "auto")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise ValueError(f"keep_last={self.keep_last!r} must be a whole number of at least 0.")
        parse_bytes(self.min_bytes, "min_bytes")
        if self.select != "auto" and (isinstance(self.select, str) or not self.select):
            raise ValueError(
                f'select={self.select!r} must be "auto", or a list of names and positions of the block\'s arguments.'
            )
        if self.activations == "all" and self.offload is None:
            raise ValueError(
                "activations='all' needs a place to offload to: set offload to 'cpu', 'disk' or 'cpu+disk'."
            )
        for name, tier in (("cpu_budget", "cpu"), ("disk_budget", "disk"), ("directory", "disk")):
            value = getattr(self, name)
            if value is None:
                continue
            if tier not in (self.offload or ""):
                raise ValueError(
                    f"{name}={value!r} has no meaning with offload={self.offload!r}: set offload={tier!r} or 'cpu+disk'."
                )
            if name != "directory" and parse_bytes(value, name) < 1:
                raise ValueError(f"{name}={value!r} must be at least one byte.")


def as_tiling(value: bool | int | Tiling | None) -> Tiling | None:
    """Read the short form of strategies: a bare number is a shard count, ``True`` the default, ``False`` and ``None``
    turn tiling off.
    """
    if value is None or isinstance(value, Tiling):
        return value
    if isinstance(value, bool):
        return Tiling() if value else None
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"tiling={value!r} is not understood: give a number of tiles, True, False or a Tiling.")
    return Tiling(num_shards=value)


def as_loss(value: bool | int | None, tiling: Tiling | None) -> LossShards | None:
    """Read the short form of strategies: ``True``, or a number of tiles. The deprecated ``Tiling.loss`` counts without."""
    if value is None and tiling is not None:
        value = tiling.loss
    _check_count("loss", value, None, False, True)
    return None if value is None or value is False else "auto" if value is True else value


def as_checkpointing(value: bool | Tiers | Checkpointing | None) -> Checkpointing | None:
    """Read the short form of strategies: ``True`` is the default policy, tiers offload to there, ``False`` and ``None``
    turn it off.
    """
    if value is None or isinstance(value, Checkpointing):
        return value
    if value in ("cpu", "disk", "cpu+disk"):
        return Checkpointing(offload=value)
    if not isinstance(value, bool):
        raise ValueError(
            f"checkpointing={value!r} is not understood: give True, False, 'cpu', 'disk', 'cpu+disk' or a Checkpointing."
        )
    return Checkpointing() if value else None


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """A number of bytes from a number, or from a text with a unit: ``"32GiB"``, ``"500 GB"``, ``"1.5TiB"``.

    Raises:
        ValueError: If it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(value).lower())
    if match is None or match[2] not in _UNITS or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a number of bytes: write 1000000, '32GiB' or '500GB'.")
    return int(float(match[1]) * _UNITS[match[2]])


def _check_count(name: str, value: object, *also: object) -> None:
    if any(value is other or (value == other and isinstance(value, str)) for other in also):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, also))} or a whole number of at least 1.")


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def check_compile(value: object, name: str) -> None:
    """Refuse what ``torch.compile`` would not take.

    Raises:
        ValueError: If it is neither a truth value nor arguments of ``torch.compile``.
    """
    if not isinstance(value, bool | Mapping):
        raise ValueError(
            f"{name}={value!r} must be True, False, or arguments of torch.compile such as {{'mode': 'max-autotune'}}."
        )
    known = CompileOptions.__annotations__
    unknown = [key for key in value if key not in known] if isinstance(value, Mapping) else []
    if unknown:
        raise ValueError(
            f"{name} has no argument {', '.join(map(repr, unknown))}: torch.compile takes {', '.join(known)}."
        )


def _check_targets(targets: object, also: str = "") -> None:
    if callable(targets):
        return
    names: Any = [targets] if isinstance(targets, str) else targets
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f'targets={targets!r} must be "auto", or at least one class name or path glob{also}.')
