"""What is known of a tiled module: what was found at setup, what the engine needs, and what its calls found out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lt_tiled._log import inform
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.policies import Tiling
from lt_tiled.tiling.cut import Bounds, Layout


@dataclass(frozen=True)
class TileSpec:
    """What a module with tiles is. It refers to no module, so copies of a model share it."""

    name: str
    """The name in messages."""
    kind: str
    """The class, or ``Class.method``."""
    parts: tuple[str, ...] | None = None
    """The children that a method uses; ``None`` for the whole module."""
    below: tuple[str, ...] = ()
    """The paths of a mixture's experts, which are tiled where the mixture as a whole cannot be."""
    sizes: MLPSizes | None = None
    """Its sizes, where its weights show them."""
    requested: bool = True
    """Whether a user chose it. Else it stays untiled where it cannot be tiled."""
    is_lone_norm: bool = False
    """Whether it is a norm that the policy does not name, and that is not next to an MLP."""
    pends: bool = False
    """Whether its output may be pending, because what follows may run in the same tiles."""


@dataclass
class LargestCall:
    """Tokens and tiles of the largest call so far, for the report."""

    tokens: int = 0
    tiles: int = 0

    def note(self, tokens: int, bounds: Sequence[Bounds], what: str, key: object = "") -> None:
        """Remember the largest call, and log the number of tiles of the first one of this kind that has several."""
        first = self.tiles < 2 <= len(bounds)
        if tokens >= self.tokens:
            self.tokens, self.tiles = tokens, len(bounds)
        if first:
            size = bounds[0][1] - bounds[0][0]
            inform(
                f"{what} runs in {len(bounds)} tiles of {size} tokens (input of {tokens} tokens)", once=f"{what} {key}"
            )


@dataclass
class EngineNeeds:
    """What the engine needs of tiled modules; a subclass finds the engine."""

    zeros_for_unused: bool = False
    """Whether weights that no tile used get zero gradients."""
    pending: bool = True
    """Whether norms may run in the tiles of what follows: the weights of both must be there."""
    one_order: bool = True
    """Whether gradients must arrive in one order on all ranks: see NOTE [One order on all ranks]."""

    def update(self, module: nn.Module) -> None:
        """Look for the engine in a call of this tiled module, if it is not known."""

    def forget(self) -> None:
        """Look for the engine in the next call."""


@dataclass(eq=False)
class Owner:
    """Identifies one ``prepare`` call, which restores the modules that it tiled."""

    passed: set[Hashable] = field(default_factory=set)
    """The kinds of modules and calls that passed the self-check."""


@dataclass(frozen=True)
class Plan:
    """What the first tile of the first call of a kind shows, and later calls only read."""

    last: nn.Linear | None
    """The module whose output a tile returns as it is: see NOTE [What the recompute leaves out]."""
    layout: Layout


class Tiled:
    """What was found at setup, asked for and found out of a tiled module."""

    def __init__(self, spec: TileSpec, tiling: Tiling, needs: EngineNeeds, owner: Owner | None) -> None:
        self.spec, self.tiling, self.needs, self.owner = spec, tiling, needs, owner
        self.largest = LargestCall()
        self.untiled = False
        """Whether it failed the self-check."""
        self.forget()

    def forget(self) -> None:
        """Forget what calls found out: a copy of a module finds it out again."""
        self.plans: dict[Hashable, Plan] = {}
        """What is known of each kind of call."""
        self.checked: set[Hashable] = set()
        """The kinds of calls that passed the self-check."""
        self.refused: set[Hashable] = set()
        """The functions that failed it together with a norm."""
        self.outputs: dict[Hashable, Any] = {}
        """What pending outputs are like."""
