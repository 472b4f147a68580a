"""What a tiled module carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lt_tiled._log import inform_once
from lt_tiled.modules.patch import Mark
from lt_tiled.policies import Tiling
from lt_tiled.tiling.layout import Bounds, OutputLayout


class CountedMark(Mark):
    """A mark of something that runs in tiles."""

    largest = (0, 0)
    """Tokens and tiles of the largest call so far."""

    def note(self, tokens: int, bounds: Sequence[Bounds], what: str, key: str = "") -> None:
        """Remember the largest call for the report, and log the number of tiles the first time that it is cut.

        Args:
            tokens: Of the call.
            bounds: Its tiles.
            what: The subject of the line.
            key: What else tells one line from another.
        """
        if tokens >= self.largest[0]:
            self.largest = (tokens, len(bounds))
        if len(bounds) > 1:
            size = bounds[0][1] - bounds[0][0]
            inform_once(
                f"{what} {key}", f"{what} runs in {len(bounds)} tiles of {size} tokens (input of {tokens} tokens)"
            )


class TileMark(CountedMark):
    """What a tiled module carries: its policy, and what its calls have shown so far."""

    attribute = "_lt_tiled_tiling"

    def __init__(self, tiling: Tiling, name: str, kind: str) -> None:
        self.tiling = tiling
        self.name = name
        """What messages call it."""
        self.kind = kind
        """Its class, in words."""
        self.checked: set[tuple[Any, ...]] = set()
        """In which modes, of training and of gradients, a self-check has passed."""
        self.suffix = ""
        """What the path of the module lacks to name what is tiled: a method, the other half of a chain."""
        self.widths: tuple[int, int] | None = None
        """Of the hidden states, and between the projections."""
        self.weight_bytes = 0
        self.whole = False
        """Whether the module turned out to be one that must run untiled."""
        self.below: tuple[str, ...] = ()
        """The parts of it that are tiled then, of a mixture of experts for one, by their paths."""
        self.chained = False
        """Whether what runs behind the module is tiled with it; see :mod:`lt_tiled.tiling.deferred`."""
        self.hooked = False
        """Whether somebody hooked what runs behind it, and would see what is not there yet."""
        self.alone = True
        """Whether the module is worth tiling without that."""
        self.gives_a_tensor: bool | None = None
        self.layouts: dict[tuple[Any, ...], OutputLayout] = {}
        """By the work, the output's tree and the rank of the hidden states."""
        self.packs: dict[tuple[Any, ...], int | None] = {}
        """How many tensors a tile's graph saves; ``None`` where that differs from tile to tile."""
        self.plain = False
        """Whether tiles run uncompiled, because they cannot be compiled."""
        self.zeros_for_unused = False
        """Whether weights that no tile used get a gradient of zeros instead of none, for engines whose hooks want
        one."""
