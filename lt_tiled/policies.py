"""The policies that a user sets in Python or YAML, as frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Policy = TypeVar("Policy")
Keep = Literal["attention"] | Sequence[str | Callable[..., Any]]
Compare = Literal["raise", "warn"]
Tiers = Literal["cpu", "disk", "cpu+disk"]
LossShards = int | Literal["auto", "always"]
"""Tiles of a loss: their number, or ``"auto"``; ``"always"`` is that in evaluation, too."""


@dataclass(frozen=True)
class Tiling:
    """Settings of tiled modules.

    Raises:
        ValueError: If a count is not positive, both counts are given, ``accumulate`` is unknown, or ``targets`` is
            empty.
    """

    num_shards: int | Literal["auto"] = "auto"
    """Number of tiles per call. ``"auto"`` uses ``ceil(12 * intermediate_size / hidden_size)`` tiles of at least 4096
    tokens, or 1024 for small weights; more would hardly lower the peak memory."""
    tile_tokens: int | None = None
    """Largest number of tokens per tile. Give this or ``num_shards``, not both."""
    targets: str | Sequence[str] | Callable[[str, Any], bool] = "auto"
    """Modules to tile. ``"auto"`` selects the MLP of each block and norms, ``"mlp"`` each MLP and the norms next to it.
    Otherwise a class name, a path glob (``model.layers.*.mlp``), or a list of these. In Python, also a function that
    takes a module's path and the module and returns whether to tile it."""
    accumulate: Literal["float32", "param"] = "float32"
    """Dtype in which gradients of 16-bit weights are summed over the tiles. ``"param"`` saves the float32 buffer, but
    its rounding error grows with the number of tiles."""
    self_check: bool = True
    """Whether to run a few tokens of the first tiled input with and without tiles, and to raise an error if outputs or
    gradients differ."""
    compare: Compare = "raise"
    """Whether to ``"raise"`` an error or to ``"warn"`` at the end of a backward pass in which the recompute of a tile
    computed different values from its forward pass."""
    compile: bool | dict[str, Any] = False
    """Whether to compile the module's own forward, which tiles run. Arguments of ``torch.compile`` are passed as a
    dictionary, such as ``{mode: max-autotune}``."""

    def __post_init__(self) -> None:
        check_count("num_shards", self.num_shards, "auto")
        check_count("tile_tokens", self.tile_tokens, None)
        if self.num_shards != "auto" and self.tile_tokens is not None:
            raise ValueError(
                f"num_shards={self.num_shards} and tile_tokens={self.tile_tokens} both set the tile size: pass only"
                " one."
            )
        _check_choice("accumulate", self.accumulate, ("float32", "param"))
        _check_choice("compare", self.compare, get_args(Compare))
        _check_targets(self.targets, also="; to tile only the loss, pass tiling=False and loss=True")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Settings of activation checkpointing and of offloading block inputs.

    Raises:
        ValueError: If a value is out of bounds, or configures a tier that ``offload`` does not use.
    """

    targets: str | Sequence[str] | Callable[[str, Any], bool] = "auto"
    """Blocks to recompute. ``"auto"`` selects the repeated layers of the model. Otherwise a class name, a path glob
    (``model.layers.*``), or a list of these. In Python, also a function that takes a module's path and the module and
    returns whether to recompute it."""
    offload: Tiers | None = None
    """Where to offload block inputs of at least 1 MiB. ``"cpu"`` is pinned CPU memory, and ``"cpu+disk"`` uses the disk
    once CPU memory is full. ``None`` keeps inputs on the device."""
    directory: str | None = None
    """Directory on the disk to use, by default the system's temporary directory. No file is left in it."""
    cpu_budget: int | str | None = None
    """CPU memory of a node, shared by its ranks, in bytes or as a string such as ``"32GiB"``. By default, half of the
    memory that is available."""
    disk_budget: int | str | None = None
    """Disk space of a node, shared by its ranks and reserved at setup. By default, the file grows as needed."""
    prefetch: int = 2
    """Number of block inputs to load ahead in the backward pass, up to 4 GiB."""
    keep_last: int = 1
    """Number of last blocks whose inputs stay on the device, because the backward pass needs them first."""
    direct_io: bool = True
    """Whether to bypass the page cache if the filesystem supports it."""
    keep: Keep | None = None
    """Operators whose outputs a block saves instead of recomputing them. ``"attention"`` selects sdpa, flash and flex
    attention, and the tensors that ranks exchange for it. Otherwise names such as ``["aten.mm"]``, or operators of
    ``torch.ops``. Outputs are offloaded like block inputs. Operators inside tiles are always recomputed."""
    compare: Compare = "raise"
    """Whether to ``"raise"`` an error or to ``"warn"`` at the end of a backward pass in which the recompute of a block
    computed different values from its forward pass."""

    def __post_init__(self) -> None:
        _check_targets(self.targets)
        _check_choice("offload", self.offload, (None, *get_args(Tiers)))
        _check_choice("compare", self.compare, get_args(Compare))
        check_count("prefetch", self.prefetch)
        check_count("keep_last", self.keep_last, least=0)
        if callable(self.keep) or (isinstance(self.keep, str) and self.keep != "attention"):
            raise ValueError(f"keep={self.keep!r} must be 'attention', or a list of operators as ['aten.mm'].")
        for name, tier in (("cpu_budget", "cpu"), ("disk_budget", "disk"), ("directory", "disk")):
            value = getattr(self, name)
            if value is not None and tier not in (self.offload or ""):
                where = f"offload={self.offload!r}: set offload={tier!r} or 'cpu+disk'."
                raise ValueError(f"{name}={value!r} has no effect with {where}")
            if value is not None and name != "directory" and parse_bytes(value, name) < 1:
                raise ValueError(f"{name}={value!r} must be at least one byte.")


ActivationCheckpointingLike = bool | Tiers | ActivationCheckpointing
"""What ``activation_checkpointing=`` accepts."""


@dataclass(frozen=True)
class SequenceParallel:
    """Settings of sequence parallelism.

    Raises:
        ValueError: If a value is out of bounds.
    """

    size: int = 1
    """Number of ranks that share a sequence. It must divide the number of all ranks."""
    targets: str | Sequence[str] = "auto"
    """Parts of the model that are shared. ``"auto"`` shares a causal model of transformers from its token ids to its
    loss, and other models from the first block to the last. Otherwise class names or path globs of modules that take
    hidden states ``[B, S, H]`` and return hidden states."""
    self_check: bool = True
    """Whether to run some tokens of the first input whole on each rank and shared, and to raise an error if outputs or
    gradients differ."""

    def __post_init__(self) -> None:
        check_count("size", self.size)
        _check_targets(self.targets)


def as_policy(value: Any, policy: type[Policy], field: str) -> Policy | None:
    """Return the policy for a short form: ``True`` (the default), a value of the field, ``False`` or ``None`` (off)."""
    if value is None or value is False:
        return None
    if value is True:
        return policy()
    if isinstance(value, policy):
        return value
    return policy(**{field: value})


def as_loss(value: bool | int | Literal["always"] | None) -> LossShards | None:
    """Return the tiles for a short form: ``True``, ``"always"`` or a number, ``False`` or ``None`` (off)."""
    check_count("loss", value, None, False, True, "always")
    if value is None or value is False:
        return None
    if value is True:
        return "auto"
    return value


def as_sequence_parallel(value: int | SequenceParallel | None) -> SequenceParallel | None:
    """Return the policy for a short form: a number of ranks, or ``None`` (off). One rank is off."""
    if value is not None and not isinstance(value, SequenceParallel):
        value = SequenceParallel(value)
    if value is None or value.size == 1:
        return None
    return value


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """Return the bytes that a number, or a string such as ``"32GiB"``, ``"500 GB"`` or ``"1.5TiB"`` means.

    Raises:
        ValueError: If it is neither of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(value).lower())
    if match is None or match[2] not in _UNITS or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a number of bytes: write 1000000, '32GiB' or '500GB'.")
    return int(float(match[1]) * _UNITS[match[2]])


def check_count(name: str, value: object, *also: object, least: int = 1) -> None:
    """Raise ``ValueError`` unless the value is an integer of at least ``least``, or one of ``also``."""
    if any(value is other or (value == other and isinstance(value, str)) for other in also):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        choices = " or ".join([*map(repr, also), f"an integer of at least {least}"])
        raise ValueError(f"{name}={value!r} must be {choices}.")


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _check_targets(targets: object, also: str = "") -> None:
    if callable(targets):
        return
    names: Any = [targets] if isinstance(targets, str) else targets
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f'targets={targets!r} must be "auto", or at least one class name or path glob{also}.')
