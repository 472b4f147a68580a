"""A tiled module's graph must be closed: it begins at the arguments and the weights, and ends at the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Kept = dict[tuple[str, str], Tensor]


def kept_tensors(module: nn.Module) -> Kept:
    """The tensors with a graph in the module's attributes, by submodule and name."""
    attributes = ((path, name, v) for path, part in module.named_modules() for name, v in part.__dict__.items())
    return {(path, name): v for path, name, v in attributes if isinstance(v, Tensor) and v.grad_fn is not None}


def check_closed(output: Any, leaves: Sequence[Tensor], module: nn.Module, before: Kept, name: str) -> None:
    """Look at the graph of one tile for gradients that would be lost.

    Args:
        output: What the tile's run returned.
        leaves: The leaves that its graph may have: arguments and weights.
        module: The module that ran.
        before: Its :func:`kept_tensors` before the run.
        name: What messages call it.

    Raises:
        ValueError: If the output depends on a tensor that is neither an argument nor a registered weight, or if the module keeps a tensor
            with a graph in an attribute, as it does for an auxiliary loss.
    """
    known = {id(leaf) for leaf in leaves}
    nodes = [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise ValueError(
                f"{name}: its output depends on a tensor of shape {list(variable.shape)} that is neither one of its arguments nor one of"
                " its registered parameters or buffers, and would get no gradient. Register it, pass it as an argument, or leave the module"
                " out of targets."
            )
        nodes += [following for following, _ in node.next_functions if following is not None]
    for (path, attribute), value in kept_tensors(module).items():
        # What the output depends on (a normalised weight) is computed anew in each run; the rest is kept for somebody else.
        if value is not before.get((path, attribute)) and value.grad_fn not in seen:
            where = f"{path}.{attribute}" if path else attribute
            raise ValueError(
                f"{name}: it keeps a tensor with a graph in its attribute {where}, of one tile only when it is tiled. Return it as an"
                " output instead, or leave the module out of targets."
            )
