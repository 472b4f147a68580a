"""Which modules are tiled: find, mark, unmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lt_tiled._find import NothingFound, find_blocks, find_named, outermost, unwrapped, walk
from lt_tiled._marks import get_mark, remove_mark, set_mark
from lt_tiled.policies import Tiling
from lt_tiled.tiling.call import TileMark
from lt_tiled.tiling.function import tiled_forward


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs in place of a tiled module's forward. Its name is what pickle looks up on the class."""
    mark = self.__dict__[TileMark.attribute]
    return tiled_forward(self, mark, args, kwargs) if mark.active else mark.inner(self, *args, **kwargs)


def tile(
    module: nn.Module,
    *,
    num_shards: int | Literal["auto"] = "auto",
    tile_tokens: int | None = None,
    accumulate: Literal["float32", "param"] = "float32",
    self_check: bool = True,
    reductions: Mapping[str, Literal["sum", "mean"]] | None = None,
) -> nn.Module:
    """Let one token-wise module run tile by tile, in place.

    The module's results, gradients, keys and hooks stay as they are; the intermediates of one tile at a time are alive.

    Args:
        module: A module that works token by token on hidden states ``[B, S, H]`` or ``[T, H]``: an MLP, an MoE block, a norm.
        num_shards: Tiles per call, or ``"auto"``.
        tile_tokens: Tokens per tile: the other way to say it.
        accumulate: The dtype in which weight gradients of 16-bit weights are summed.
        self_check: Compare a few tokens whole and in tiles at the first tiled call.
        reductions: How outputs that are not per token go together; see :class:`~lt_tiled.policies.Tiling`.

    Returns:
        The same module.

    Raises:
        ValueError: If the module is tiled already, or normalises over the batch, or a value is out of bounds.
    """
    policy = Tiling(num_shards, tile_tokens, accumulate=accumulate, self_check=self_check, reductions=reductions)
    mark_tiled(module, policy, type(module).__name__)
    return module


def untile(module: nn.Module) -> nn.Module:
    """Undo :func:`tile`: the module is as it was. Does nothing to a module that is not tiled."""
    remove_mark(module, TileMark, forward)
    return module


def mark_tiled(module: nn.Module, tiling: Tiling, name: str) -> None:
    """Hang the tiling on the module; ``name`` is what messages call it."""
    if get_mark(module, TileMark) is not None:
        raise ValueError(f"{name} is tiled already: call lt_tiled.untile() on it first.")
    for below, part in [("", module), *walk(module)]:
        if isinstance(part, _BatchNorm):
            raise ValueError(
                f"{name} is not token-wise: {below or 'it'} is a {type(part).__name__}, whose statistics in training depend on all"
                " tokens. Leave the module out of targets."
            )
    set_mark(module, TileMark(tiling, name), forward)


def find_tileable(model: nn.Module, tiling: Tiling) -> list[tuple[str, nn.Module]]:
    """The modules that the policy names, or with ``"auto"`` the feed-forward part of every block.

    Raises:
        ValueError: If a target matches nothing, or ``"auto"`` finds nothing.
    """
    if tiling.targets != "auto":
        return find_named(model, tiling.targets, "Tiling")
    roots = find_blocks(model) or [("", model)]
    found = outermost(pair for path, root in roots for pair in _feed_forwards(root, path))
    if not found:
        raise NothingFound(
            f"Tiling found no feed-forward module in {type(model).__name__} (a part of a block that widens and narrows again): name"
            " it, as in Tiling(targets=['MyMLP']) or Tiling(targets='layers.*.mlp'), or turn tiling off with tiling=None."
        )
    return found


def tiled_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that are tiled now, with their paths."""
    return [(path, m) for path, m in [("", model), *walk(model)] if get_mark(m, TileMark) is not None]


def _feed_forwards(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in root.named_children():
        child = unwrapped(child)
        below = f"{path}.{name}" if path else name
        if _mixes_tokens(name, child):
            continue
        parts = list(walk(child))
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not container and _widens(child) and not any(_mixes_tokens(p.rpartition(".")[2], m) for p, m in parts):
            yield below, child
        else:
            yield from _feed_forwards(child, below)


def _mixes_tokens(name: str, module: nn.Module) -> bool:
    """Whether the module is known to look across tokens: attention, convolutions, recurrences."""
    if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
        return True
    label = f"{name} {type(module).__name__}".lower()
    return "attn" in label or "attention" in label


def _widens(module: nn.Module) -> bool:
    """Whether projections lead from some width to a larger one and back, or to experts that do."""
    if any(name == "experts" for name, _ in module.named_children()):
        return True
    widths = [w for _, m in walk(module) if (w := _widths(m)) is not None]
    return any(
        inner > hidden and (hidden, gate * inner) in widths
        for inner, hidden in widths
        for gate in (1, 2)  # 2: gate and up in one
    )


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output width of a projection (``nn.Linear`` and what looks like it, Hugging Face's ``Conv1D``)."""
    for pair in (("in_features", "out_features"), ("nx", "nf")):
        values = tuple(getattr(module, name, None) for name in pair)
        if all(isinstance(value, int) for value in values):
            return values  # type: ignore[return-value]
    return None
