"""What is known of a tiled module: what was found, what its calls showed, and what the engine needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lt_tiled._log import inform
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.policies import Tiling
from lt_tiled.tiling.layout import Bounds
from lt_tiled.tiling.observe import History
from lt_tiled.tiling.recompute import CallCounter


@dataclass(frozen=True)
class Found:
    """What a tiled module is. It refers to no module, so copies of a model share it."""

    name: str
    """The name in messages."""
    kind: str
    """The class, or ``Class.method``."""
    method: str = "forward"
    parts: tuple[str, ...] | None = None
    """The children that a method uses; ``None`` for the whole module."""
    below: tuple[str, ...] = ()
    """The paths of a mixture's experts, which are tiled where the mixture as a whole cannot be."""
    sizes: MLPSizes | None = None
    """Its sizes, where its weights show them."""
    before: bool = False
    """Whether a norm before it may run in its tiles."""
    after: bool = False
    """Whether a norm, or a projection, that takes its output may run in its tiles."""
    named: bool = True
    """Whether a user chose it. Else it stays untiled where it cannot be tiled."""
    guessed: bool = False
    """Whether it is a norm that the policy does not name."""


@dataclass
class Learned:
    """What the calls of one copy of a module showed. Each entry can be learned again."""

    largest: tuple[int, int] = (0, 0)
    """Tokens and tiles of the largest call."""
    checked: set[Hashable] = field(default_factory=set)
    """What passed the self-check, by work and mode."""
    refused: set[Hashable] = field(default_factory=set)
    """The keys of works that are not tiled together with a neighbor."""
    alone: set[Hashable] = field(default_factory=set)
    """The keys of neighbors that ran alone, because something else, such as a hook, used their output first."""
    signatures: dict[Hashable, Any] = field(default_factory=dict)
    """Trailing shape and dtype of an output that is one tensor, where no random numbers are drawn; else ``None``."""
    histories: dict[Hashable, History] = field(default_factory=lambda: defaultdict(History))
    """What observations of each work showed."""
    runs: dict[Hashable, CallCounter] = field(default_factory=lambda: defaultdict(CallCounter))
    """How often each module ran."""
    last: dict[Hashable, int | None] = field(default_factory=dict)
    """Which part of the work is the last projection of a tile, if the tile returns its output as it is."""
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    """The compiled functions of works."""
    untiled: bool = False
    """Whether the module runs untiled, with its experts tiled where it has some."""

    def note(self, tokens: int, bounds: Sequence[Bounds], what: str, key: str = "") -> None:
        """Remember the largest call for the report, and log the number of tiles of the first call that has several.

        Args:
            tokens: The number of tokens of the call.
            bounds: Its tiles.
            what: The subject of the log line.
            key: Tells log lines of different policies apart.
        """
        first = self.largest[1] < 2 <= len(bounds)
        if tokens >= self.largest[0]:
            self.largest = (tokens, len(bounds))
        if first:
            size = bounds[0][1] - bounds[0][0]
            inform(
                f"{what} runs in {len(bounds)} tiles of {size} tokens (input of {tokens} tokens)", once=f"{what} {key}"
            )


@dataclass
class EngineNeeds:
    """What the engine needs of tiled modules."""

    zeros_for_unused: bool = False
    """Whether weights that no tile used get zero gradients, for engines whose hooks want a gradient for each."""
    same_order: bool = False
    """Whether gradients must arrive in the same order on all ranks: calls that are too short for two tiles run as one,
    and what would fall back to another path is an error, once all ranks agreed about it."""
    agreed: bool = False
    """Whether they did, before the first backward pass."""
    defer: bool = True
    """Whether neighbors may run in the same tiles: their weights must be there while both run."""

    known: bool = True
    """Whether this is final. Otherwise a call looks for the engine if the following changed."""
    holder: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    weight: Any = "unknown"
    """A weight, and where it was, when there was no engine."""
    hooks: Any = None
    """Its hooks."""

    leaves: dict[nn.Module, str] = field(default_factory=dict)
    """The leaf modules that ZeRO-3 gave hooks, with their names."""
    handles: list[Any] = field(default_factory=list)
    """Hooks that are there until the model is released."""
    task: int = -1
    """The backward pass in which these modules are checked."""
    in_bucket: dict[nn.Parameter, Callable[[], Any]] = field(default_factory=dict)
    """Weak references to the gradients of their weights that ZeRO-3 took in it."""

    def forget(self) -> None:
        """Look for the engine in the next call."""
        self.known, self.weight = False, "unknown"

    def find(self, module: nn.Module) -> None:
        """Find the engine in a call of this tiled module."""


@dataclass(eq=False)
class Owner:
    """Identifies one ``prepare`` call, which restores the modules that it tiled."""

    passed: set[Hashable] = field(default_factory=set)
    """The kinds of the calls that passed the self-check."""


class Tiled:
    """What was found, asked for and learned of a tiled module."""

    def __init__(self, found: Found, tiling: Tiling, needs: EngineNeeds, owner: Owner | None = None) -> None:
        self.found, self.tiling, self.needs, self.owner = found, tiling, needs, owner
        self.name = found.name
        """The name in messages."""
        self.learned = Learned()

    def note_alone(self, key: Hashable) -> None:
        """Note, where all ranks need the same order of gradients, that a neighbor ran alone.

        Raises:
            RuntimeError: If the ranks agreed on another order.
        """
        if self.needs.agreed and key not in self.learned.alone:
            raise RuntimeError(
                f"{self.name}: something, such as a new hook, used the output of its neighbor first, so the two do not"
                " run in the same tiles. The engine needs the same order of gradients on all ranks: set hooks on all"
                " ranks and before the first step, or name the modules to tile, as in Tiling(targets=...)."
            )
        self.learned.alone.add(key)

    def must_run_alone(self, key: Hashable) -> bool:
        """Whether all ranks agreed that a neighbor runs alone."""
        return self.needs.agreed and key in self.learned.alone
