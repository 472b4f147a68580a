"""What is known of a tiled module, and what one call of it consists of: a function, arguments, tiles and weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled._log import inform
from lt_tiled.modules.feed_forward import MLPSizes
from lt_tiled.policies import Tiling
from lt_tiled.recompute.mode import Precision
from lt_tiled.tiling.cut import Bounds, Layout, Tokens
from lt_tiled.tiling.weights import Weights, weights_of

# What is known of a tiled module


@dataclass(frozen=True)
class TileSpec:
    """What a module with tiles is. It refers to no module, so copies of a model share it."""

    name: str
    """The name in messages."""
    kind: str
    """The class, or ``Class.method``."""
    parts: tuple[str, ...] | None = None
    """The children that a method uses; ``None`` for the whole module."""
    sizes: MLPSizes | None = None
    """Its sizes, where its weights show them."""
    requested: bool = True
    """Whether a user chose it. Else it stays untiled where it cannot be tiled."""
    is_lone_norm: bool = False
    """Whether it is a norm that the policy does not name, and that is not next to an MLP."""
    pends: bool = False
    """Whether its output may be pending, because what follows may run in the same tiles."""
    alone: bool = True
    """Whether it runs in tiles where it cannot share those of another module."""


@dataclass
class LargestCall:
    """Tokens and tiles of the largest call so far, for the report."""

    tokens: int = 0
    tiles: int = 0

    def note(self, tokens: int, bounds: Sequence[Bounds], what: str) -> None:
        """Remember the largest call, and log the number of tiles of the first one of this kind that has several."""
        first = self.tiles < 2 <= len(bounds)
        if tokens >= self.tokens:
            self.tokens, self.tiles = tokens, len(bounds)
        if first:
            size = bounds[0][1] - bounds[0][0]
            inform(f"{what} runs in {len(bounds)} tiles of {size} tokens (input of {tokens} tokens)", once=what)


@dataclass
class EngineNeeds:
    """What the engine needs of tiled modules; a subclass finds the engine."""

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
    output: tuple[torch.Size, torch.dtype] | None
    """Of a single output that may be pending: its dimensions behind those of the tokens, and its dtype."""


class Tiled:
    """What was found at setup, asked for and found out of a tiled module."""

    def __init__(
        self, spec: TileSpec, tiling: Tiling, needs: EngineNeeds, owner: Owner | None, leader: Any = None
    ) -> None:
        self.spec = spec
        self.tiling = tiling
        self.needs = needs
        self.owner = owner
        self.leader = leader or self
        self.largest = LargestCall()
        self.untiled = False
        """Whether it failed the self-check."""
        self.forget()

    def forget(self) -> None:
        """Forget what calls found out: a copy of a module finds it out again."""
        self.plans: dict[Hashable, Plan | None] = {}
        """What is known of each kind of call; ``None`` if it failed the self-check."""


# A call of it


@dataclass(frozen=True, eq=False)
class TileFunction:
    """A position-wise function of tensors: a module's forward, a method, a norm and what follows it."""

    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    """The modules that hold its weights, in the order in which they run."""
    key: Hashable
    """Tells the functions of one tiled module apart."""
    parts: Sequence[nn.Module]
    """The modules and their submodules."""
    inside: Sequence[nn.Module]
    """Those of them whose hooks see tiles: the hooks of a module that runs by its forward run around its tiles."""
    joined: bool = False
    """Whether a norm and what follows it run together."""

    @classmethod
    def of(cls, run: Callable[..., Any], modules: tuple[nn.Module, ...], key: Hashable, whole: bool) -> TileFunction:
        """Return the function of modules, which run by their forward, or else are the parts of a method."""
        parts = [part for module in modules for part in module.modules()]
        inside = [part for part in parts if part not in modules] if whole else parts
        return cls(run, modules, key, parts, inside)

    def after(self, first: TiledCall) -> TileFunction:
        """Return the function that runs a norm's call first, whose tensors take the place of the first argument."""
        parts = [*first.function.parts, *self.parts]
        inside = [*first.function.inside, *self.inside]
        run = partial(_run_both, first.run, self.run, len(first.per_token))
        modules = first.function.modules + self.modules
        return TileFunction(run, modules, (first.kind, self.key), parts, inside, joined=True)


def _run_both(first: Callable[..., Any], second: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> Any:
    return second(first(*args[:count]), *args[count:], **kwargs)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call without the tensors among them. What holds tensors itself is passed on as it is."""

    others: tuple[Any, ...]
    """With a mark in the place of each tensor."""
    names: tuple[str, ...]
    """Of the last ones, which are given by name."""

    def call(self, run: Callable[..., Any], tensors: Iterable[Tensor]) -> Any:
        """Call a function with tensors in the places of these."""
        given = iter(tensors)
        values = [next(given) if value is _TENSOR else value for value in self.others]
        count = len(values) - len(self.names)
        return run(*values[:count], **dict(zip(self.names, values[count:], strict=True)))


_TENSOR = object()


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Arguments]:
    """Return the tensors, and what is needed to call with others."""
    tensors: list[Tensor] = []
    others: list[Any] = []
    for value in (*args, *kwargs.values()):
        is_tensor = isinstance(value, Tensor)
        others.append(_TENSOR if is_tensor else value)
        if is_tensor:
            tensors.append(value)
    return tensors, Arguments(tuple(others), tuple(kwargs))


_BY_VALUE = (int, float, str, type(None))
"""Arguments that choose what a module computes, such as flags."""


class TiledCall:
    """One call. It holds no activation: the anchor saves those."""

    def __init__(
        self,
        function: TileFunction,
        inputs: Sequence[Tensor],
        arguments: Arguments,
        tokens: Tokens,
        bounds: Sequence[Bounds],
        tiled: Tiled,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.tokens = tokens
        self.bounds = bounds
        self.tiled = tiled
        self.name = tiled.spec.name
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
        plain = len(inputs) == len(arguments.others) and not arguments.names
        self.run: Callable[..., Any] = function.run if plain else self._run
        """Runs the function on the tensors of one tile."""

    def _kind(self) -> tuple[Hashable, ...]:
        # Auxiliary losses are computed in training only, a batch of one row does not show what mixes rows, and frozen
        # weights or arguments not what their gradients show.
        training = [part.training for part in self.function.parts].count(True)
        several = tuple([size > 1 for size in self.tokens.lead])
        wants = (*self.wants_grad, torch.is_grad_enabled(), len(self.weights))
        arguments = self.arguments
        others = tuple([value if isinstance(value, _BY_VALUE) else type(value) for value in arguments.others])
        return self.function.key, training, several, wants, others, arguments.names, self.precision, self.dtypes

    def _run(self, *tile: Tensor) -> Any:
        return self.arguments.call(self.function.run, tile)

    @property
    def plan(self) -> Plan:
        """What is known of calls of this kind, which run in tiles."""
        plan = self.tiled.plans[self.kind]
        assert plan is not None
        return plan

    def tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each tile: its part of those that have a row for each token, and the others whole."""
        columns: list[Iterable[Tensor]] = []
        for tensor, per_token in zip(tensors, self.per_token, strict=True):
            columns.append(self.tokens.tiles(tensor, self.bounds) if per_token else repeat(tensor, len(self.bounds)))
        return zip(*columns, strict=True)
