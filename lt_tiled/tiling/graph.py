"""The graph of a tile must begin at the arguments and weights, and end at the outputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.patch import is_patched
from lt_tiled.tiling.call import TileFunction


def check_leaves(ends: Iterable[Any], known: Container[int] | None, name: str) -> set[Any]:
    """Return the nodes of the graph behind these, and refuse leaves that are not known by their ids.

    Args:
        ends: The nodes at the end.
        known: The ids of the leaves; ``None`` for any.
        name: The name in messages.
    """
    todo = list(ends)
    nodes: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in nodes:
            continue
        nodes.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                todo.append(following)
        variable = getattr(node, "variable", None)  # of a leaf
        if known is None or not isinstance(variable, Tensor) or not variable.numel():  # the link of an anchor has none
            continue
        if id(variable) not in known:
            raise NotPositionWiseError(
                f"{name}: its output depends on a tensor of shape {list(variable.shape)} that is neither one of its"
                " arguments nor one of its registered parameters or buffers, and would get no gradient. Register it, or"
                f" pass it as an argument. {REMEDY}"
            )
    return nodes


_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}


def attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that its own code or users set, and its training mode."""
    for name, value in part.__dict__.items():
        if name not in _OF_TORCH and not name.startswith("_lt_tiled") and not is_patched(value):
            yield name, value


Kept = dict[int, tuple[str, Tensor]]
"""Tensors with the paths of the attributes that hold them, by their ids."""


def kept_tensors(function: TileFunction) -> Kept:
    """Return the tensors with a graph in the attributes of a function's modules, and in containers there."""
    found: Kept = {}
    for module in function.modules:
        for path, part in module.named_modules():
            for name, value in attributes(part):
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                        found[id(leaf)] = f"{path}.{name}".removeprefix("."), leaf
    return found


def check_closed(output: Any, leaves: Sequence[Tensor] | None, function: TileFunction, before: Kept, name: str) -> None:
    """Refuse a tile from whose graph gradients would be lost.

    Args:
        output: What the run of the tile returned.
        leaves: The leaves that its graph may have, arguments and weights; ``None`` for any.
        function: What ran.
        before: Its :func:`kept_tensors` before the run.
        name: The name in messages.

    Raises:
        NotPositionWiseError: If the output depends on another leaf, or the run kept a tensor with a graph in an
            attribute that the output does not depend on, as for an auxiliary loss.
    """
    ends = [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
    nodes = check_leaves(ends, None if leaves is None else {id(leaf) for leaf in leaves}, name)
    for key, (where, value) in kept_tensors(function).items():
        # What the output depends on (a normalized weight) is computed in each run.
        if key not in before and value.grad_fn not in nodes:
            raise NotPositionWiseError(
                f"{name}: it keeps a tensor with a graph in its attribute {where}, which would be that of one tile."
                f" Return it as an output instead. {REMEDY}"
            )
