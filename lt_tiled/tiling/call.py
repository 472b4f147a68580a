"""What one call of a tiled module consists of: a function, its arguments, its tiles and its weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.cut import Bounds, Tokens
from lt_tiled.tiling.recompute import Precision
from lt_tiled.tiling.state import Plan, Tiled
from lt_tiled.tiling.weights import Weights, weights_of


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

    def after(self, norm: TileFunction, count: int) -> TileFunction:
        """Return the function that runs a norm first, whose arguments, so many, take the place of the first one."""
        return TileFunction(
            partial(_run_both, norm.run, self.run, count),
            (*norm.modules, *self.modules),
            (norm.key, self.key),
            [*norm.parts, *self.parts],
            [*norm.inside, *self.inside],
            joined=True,
        )


def _run_both(first: Callable[..., Any], second: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> Any:
    return second(first(*args[:count]), *args[count:], **kwargs)


# Arguments


@dataclass(frozen=True)
class Arguments:
    """``(args, kwargs)`` without the tensors in them and in their tuples.

    Lists and dictionaries stay the caller's own objects, because a module may add to them.
    """

    tree: pytree.TreeSpec
    others: tuple[Any, ...]
    positions: tuple[int, ...]
    plain: bool
    """Whether the arguments are tensors alone, none of them by name or in a tuple."""

    def call_with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of theirs."""
        leaves = list(self.others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs

    def refuse_gradients_inside(self, name: str) -> None:
        """Refuse tensors that want a gradient inside lists and dictionaries, because they would get none.

        Raises:
            NotPositionWiseError: If there is one, and gradients are on.
        """
        containers = [leaf for leaf in self.others if isinstance(leaf, list | dict)]
        for leaf in pytree.tree_leaves(containers) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise NotPositionWiseError(
                    f"{name} was given a tensor that requires a gradient inside a list or a dictionary, and it would"
                    f" get none. Pass it as an argument of its own, or in a tuple. {REMEDY}"
                )


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Arguments]:
    """Return the tensors, and what is needed to call with others."""
    if not kwargs and set(map(type, args)) <= _PLAIN:
        return list(args), _plain_arguments(len(args))
    whole = (args, kwargs)
    leaves, tree = pytree.tree_flatten(whole, is_leaf=lambda node: node is not kwargs and not isinstance(node, tuple))
    tensors: list[Tensor] = []
    positions: list[int] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            positions.append(position)
            leaves[position] = None
    return tensors, Arguments(tree, tuple(leaves), tuple(positions), plain=False)


_PLAIN = {Tensor, nn.Parameter}


@cache
def _plain_arguments(count: int) -> Arguments:
    """Return those of a call with so many tensors and nothing else."""
    tree = pytree.tree_structure(((0,) * count, {}))
    return Arguments(tree, (None,) * count, tuple(range(count)), plain=True)


# One call


class TiledCall:
    """One call. It holds no activation: the anchor saves those.

    Args:
        function: What runs on each tile.
        inputs: The tensors among the arguments.
        arguments: The others.
        tokens: The leading dimensions of the hidden states.
        bounds: The tiles.
        tiled: The tiled module.
    """

    def __init__(
        self,
        function: TileFunction,
        inputs: Sequence[Tensor],
        arguments: Arguments,
        tokens: Tokens,
        bounds: Sequence[Bounds],
        tiled: Tiled,
    ) -> None:
        self.function, self.arguments, self.tokens, self.bounds = function, arguments, tokens, bounds
        self.tiled, self.name = tiled, tiled.spec.name
        self.per_token = [tokens.cover(t) for t in inputs]
        self.wants_grad = [t.requires_grad for t in inputs]
        self.device = inputs[self.per_token.index(True)].device
        self.precision = Precision.now(self.device)
        self.weights: Weights = weights_of(function.parts) if torch.is_grad_enabled() else {}
        self.differentiable = torch.is_grad_enabled() and (any(self.wants_grad) or bool(self.weights))
        """Whether a backward pass may follow."""
        self.kind = self._kind()
        """Tells whether another call runs the same code."""

    def _kind(self) -> tuple[Hashable, ...]:
        # Auxiliary losses are computed in training only, a batch of one row does not show what mixes rows, and frozen
        # weights or arguments not what their gradients show.
        training = [part.training for part in self.function.parts].count(True)
        several = tuple([size > 1 for size in self.tokens.lead])
        wants = (*self.wants_grad, torch.is_grad_enabled(), len(self.weights))
        return self.function.key, training, several, wants, self.precision

    def plan(self) -> Plan | None:
        """Return what is known of calls of this kind; ``None`` if it is the first one."""
        last = self.function.modules[-1]
        if self.tiled.tiling.compile is not False:
            return Plan(None)
        # A projection is its own last projection, and runs in tiles without its hooks.
        if type(last) is nn.Linear and self.kind not in self.tiled.plans:
            return Plan(last)
        return self.tiled.plans.get(self.kind)

    def run(self, tile: Sequence[Tensor]) -> Any:
        """Run the function on the tensors of one tile."""
        if self.arguments.plain:
            return self.function.run(*tile)
        args, kwargs = self.arguments.call_with(tile)
        return self.function.run(*args, **kwargs)

    def tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each tile: its part of those that have a row for each token, and the others whole."""
        columns: list[Iterable[Tensor]] = []
        for tensor, per_token in zip(tensors, self.per_token, strict=True):
            columns.append(self.tokens.tiles(tensor, self.bounds) if per_token else repeat(tensor, len(self.bounds)))
        return zip(*columns, strict=True)
