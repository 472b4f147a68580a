"""What is known of a tiled module, and what one call of it consists of: a function, arguments, tiles and weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled._log import inform
from lt_tiled.policies import Tiling
from lt_tiled.recompute.mode import Precision
from lt_tiled.tiling.cut import Tokens
from lt_tiled.tiling.weights import Weights, weights_of

# What is known of a tiled module


@dataclass
class LargestCall:
    """Tokens and tiles of the largest call so far, for the report."""

    tokens: int = 0
    tiles: int = 0

    def note(self, tokens: int, sizes: Sequence[int], what: str) -> None:
        """Remember the largest call, and log the number of tiles of the first one of this kind that has several."""
        first = self.tiles < 2 <= len(sizes)
        if tokens >= self.tokens:
            self.tokens, self.tiles = tokens, len(sizes)
        if first:
            inform(f"{what} runs in {len(sizes)} tiles of {sizes[0]} tokens (input of {tokens} tokens)", once=what)


@dataclass
class EngineNeeds:
    """What tiled modules of one model share: the needs of the engine, which a subclass finds, and passed checks."""

    pending: bool = True
    """Whether norms may run in the tiles of what follows: the weights of both must be there."""
    passed: set[Hashable] = field(default_factory=set)
    """The kinds of modules and calls that passed the self-check."""

    def update(self, module: nn.Module) -> None:
        """Look for the engine in a call of this tiled module, if it is not known."""


@dataclass(frozen=True)
class Plan:
    """What the first tile of the first call of a kind shows, and later calls only read."""

    last: nn.Linear | None
    """The module whose output a tile returns as it is: see NOTE [What the recompute leaves out]."""
    output: tuple[torch.Size, torch.dtype] | None
    """Of a single output that may be pending: its dimensions behind those of the tokens, and its dtype."""


# A call of it


@dataclass(frozen=True, eq=False)
class TileFunction:
    """A position-wise function of tensors: a module's forward, a method, a norm and what follows it."""

    run: Callable[..., Any]
    root: nn.Module
    """The module whose forward or method runs, of several the last one."""
    parts: Sequence[nn.Module]
    """The modules that hold its weights, with their submodules, in the order in which they run."""
    inside: Sequence[nn.Module]
    """Those whose hooks would see tiles, apart from a norm's. Hooks of a module that runs by its forward see all."""
    key: Hashable
    """Tells the functions of one tiled module apart."""
    name: str
    """The name in messages."""
    tiling: Tiling
    plans: dict[Hashable, Plan | None]
    """What is known of each kind of call of the tiled module; ``None`` if it failed the self-check."""
    first: TiledCall | None = None
    """The call of a norm that runs in the same tiles. Its tensors stand in the place of the first argument."""

    def after(self, first: TiledCall) -> TileFunction:
        """Return the function that runs behind a norm."""
        parts = [*first.function.parts, *self.parts]
        return replace(self, parts=parts, key=(first.kind, self.key), first=first)


TENSOR = object()
"""Stands in the place of a tensor among the arguments of a call."""
_BY_VALUE = (int, float, str, type(None))
"""Arguments that choose what a module computes, such as flags."""


class TiledCall:
    """One call. It holds no activation: the anchor saves those.

    Args:
        function: What runs on a tile.
        inputs: The tensors among the arguments. What holds tensors itself is passed on as it is.
        arguments: All of them, with :data:`TENSOR` in the place of each tensor.
        names: Those of the last arguments, which are given by name.
        tokens: What the inputs have rows for.
        sizes: The tokens of each tile.
    """

    def __init__(
        self,
        function: TileFunction,
        inputs: Sequence[Tensor],
        arguments: Sequence[Any],
        names: tuple[str, ...],
        tokens: Tokens,
        sizes: Sequence[int],
    ) -> None:
        self.function = function
        self.name = function.name
        self.arguments = arguments
        self.names = names
        self.tokens = tokens
        self.sizes = sizes
        self.per_token = [tokens.cover(t) for t in inputs]
        self.wants_grad = [t.requires_grad for t in inputs]
        self.device = inputs[self.per_token.index(True)].device
        self.precision = Precision.now(self.device)
        self.weights: Weights = weights_of(function.parts) if torch.is_grad_enabled() else {}
        self.differentiable = torch.is_grad_enabled() and (any(self.wants_grad) or bool(self.weights))
        """Whether a backward pass may follow."""
        self.dtypes = tuple([t.dtype for t in inputs])
        self.kind = self._kind()
        """Tells whether another call runs the same code."""
        self.own = function.run
        """The function without the norm. A recompute may put another one here for a while."""

    def _kind(self) -> tuple[Hashable, ...]:
        # Auxiliary losses are computed in training only, a batch of one row does not show what mixes rows, and frozen
        # weights or arguments not what their gradients show.
        training = [part.training for part in self.function.parts].count(True)
        several = tuple([size > 1 for size in self.tokens.lead])
        wants = (*self.wants_grad, torch.is_grad_enabled(), len(self.weights))
        others = tuple([value if isinstance(value, _BY_VALUE) else type(value) for value in self.arguments])
        return self.function.key, training, several, wants, others, self.names, self.precision, self.dtypes

    def run(self, *tile: Tensor) -> Any:
        """Run the function on the tensors of one tile."""
        tensors = iter(tile)
        values = [next(tensors) if value is TENSOR else value for value in self.arguments]
        if (first := self.function.first) is not None:
            count = len(first.per_token)
            values = [first.run(*values[:count]), *values[count:]]
        count = len(values) - len(self.names)
        return self.own(*values[:count], **dict(zip(self.names, values[count:], strict=True)))

    @property
    def plan(self) -> Plan:
        """What is known of calls of this kind, which run in tiles."""
        plan = self.function.plans[self.kind]
        assert plan is not None
        return plan

    def tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each tile: its part of those that have a row for each token, and the others whole."""
        columns: list[Iterable[Tensor]] = []
        for tensor, per_token in zip(tensors, self.per_token, strict=True):
            columns.append(self.tokens.tiles(tensor, self.sizes) if per_token else repeat(tensor, len(self.sizes)))
        return zip(*columns, strict=True)
