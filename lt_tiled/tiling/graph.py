"""The graph of a tile must begin at the arguments and weights, and end at the outputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.call import TileFunction


def check_leaves(ends: Iterable[Any], known: Container[int] | None, name: str) -> set[Any]:
    """Return the nodes of the graph behind these, and refuse leaves that are not known by their ids.

    Args:
        ends: The nodes at the end.
        known: The ids of the leaves; ``None`` for any.
        name: The name in messages.
    """
    todo, nodes = list(ends), set[Any]()
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


Kept = dict[tuple[int, str, str], Tensor]


def kept_tensors(function: TileFunction) -> Kept:
    """Return the tensors with a graph in attributes of the work's modules, by module, submodule and name."""
    parts = (
        (index, path, part) for index, module in enumerate(function.modules) for path, part in module.named_modules()
    )
    attributes = (((index, path, name), v) for index, path, part in parts for name, v in part.__dict__.items())
    return {place: v for place, v in attributes if isinstance(v, Tensor) and v.grad_fn is not None}


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
    for (index, path, attribute), value in kept_tensors(function).items():
        # What the output depends on (a normalized weight) is computed in each run.
        if value is not before.get((index, path, attribute)) and value.grad_fn not in nodes:
            where = f"{path}.{attribute}" if path else attribute
            raise NotPositionWiseError(
                f"{name}: it keeps a tensor with a graph in its attribute {where}, which would be that of one tile."
                f" Return it as an output instead. {REMEDY}"
            )
