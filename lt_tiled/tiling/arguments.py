"""The arguments of a call: its tensors, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError


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

    def call(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Call a function with other tensors in place of theirs."""
        if self.plain:
            return function(*tensors)
        args, kwargs = self.call_with(tensors)
        return function(*args, **kwargs)

    def refuse_gradients_inside(self, module: str) -> None:
        """Refuse tensors that want a gradient inside lists and dictionaries, because they would get none.

        Raises:
            NotPositionWiseError: If there is one, and gradients are on.
        """
        containers = [leaf for leaf in self.others if isinstance(leaf, list | dict)]
        if containers and torch.is_grad_enabled():
            tensors = (leaf for leaf in pytree.tree_leaves(containers) if isinstance(leaf, Tensor))
            if any(t.requires_grad for t in tensors):
                raise NotPositionWiseError(
                    f"{module} was given a tensor that requires a gradient inside a list or a dictionary, and it would"
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
    others: list[Any] = []
    for position, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, Tensor)
        others.append(None if is_tensor else leaf)
        if is_tensor:
            tensors.append(leaf)
            positions.append(position)
    return tensors, Arguments(tree, tuple(others), tuple(positions), plain=False)


_PLAIN = {Tensor, torch.nn.Parameter}


@cache
def _plain_arguments(count: int) -> Arguments:
    """Return those of a call with so many tensors and nothing else."""
    tree = pytree.tree_structure(((0,) * count, {}))
    return Arguments(tree, (None,) * count, tuple(range(count)), plain=True)
