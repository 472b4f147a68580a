"""A tiled module's graph must be closed: it begins at the arguments and the weights, and ends at the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import NotPositionWiseError
from lt_tiled.tiling.state import Work

Kept = dict[tuple[int, str, str], Tensor]


def kept_tensors(work: Work) -> Kept:
    """The tensors with a graph in the attributes of the work's modules, by module, submodule and name."""
    parts = ((index, path, part) for index, module in enumerate(work.modules) for path, part in module.named_modules())
    attributes = (((index, path, name), v) for index, path, part in parts for name, v in part.__dict__.items())
    return {place: v for place, v in attributes if isinstance(v, Tensor) and v.grad_fn is not None}


def check_closed(output: Any, leaves: Sequence[Tensor], work: Work, before: Kept, name: str) -> None:
    """Look at the graph of one tile for gradients that would be lost.

    Args:
        output: What the tile's run returned.
        leaves: The leaves that its graph may have: arguments and weights.
        work: What ran.
        before: Its :func:`kept_tensors` before the run.
        name: What messages call it.

    Raises:
        NotPositionWiseError: If the output depends on a tensor that is neither an argument nor a registered weight, or see
            :func:`check_kept`.
    """
    known = {id(leaf) for leaf in leaves}
    nodes = _graph(output)
    for node in nodes:
        variable = getattr(node, "variable", None)  # of a leaf
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise NotPositionWiseError(
                f"{name}: its output depends on a tensor of shape {list(variable.shape)} that is neither one of its arguments nor one of"
                " its registered parameters or buffers, and would get no gradient. Register it, pass it as an argument, or leave the module"
                " out of targets."
            )
    _check_kept(nodes, work, before, name)


def check_kept(output: Any, work: Work, before: Kept, name: str) -> None:
    """Look for tensors with a graph that a run of the work kept in attributes, as for an auxiliary loss.

    Raises:
        NotPositionWiseError: If there is one that the output does not depend on.
    """
    _check_kept(_graph(output), work, before, name)


def _graph(output: Any) -> set[Any]:
    """The nodes that the output's graph consists of."""
    nodes = [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return seen


def _check_kept(nodes: set[Any], work: Work, before: Kept, name: str) -> None:
    for (index, path, attribute), value in kept_tensors(work).items():
        # What the output depends on (a normalised weight) is computed anew in each run; the rest is kept for
        # another use.
        if value is not before.get((index, path, attribute)) and value.grad_fn not in nodes:
            where = f"{path}.{attribute}" if path else attribute
            raise NotPositionWiseError(
                f"{name}: it keeps a tensor with a graph in its attribute {where}, of one tile only when it is tiled. Return it as an"
                " output instead, or leave the module out of targets."
            )
