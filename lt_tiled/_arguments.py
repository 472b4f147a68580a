"""A call's arguments as tensors and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Arguments:
    """``(args, kwargs)`` without the tensors in them and in their tuples.

    Lists and dictionaries stay the caller's own objects, because a module may add to them.
    """

    tree: pytree.TreeSpec
    others: tuple[Any, ...]
    positions: tuple[int, ...]

    def call_with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of theirs."""
        leaves = list(self.others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Arguments]:
    """Return the tensors, and what is needed to call with others."""
    whole = (args, kwargs)
    leaves, tree = pytree.tree_flatten(whole, is_leaf=lambda node: node is not kwargs and not isinstance(node, tuple))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return [leaves[i] for i in positions], Arguments(tree, others, positions)
