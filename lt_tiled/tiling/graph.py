"""The graph of a tile must begin at the arguments and weights, and end at the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.weights import Work, check_leaves

Kept = dict[tuple[int, str, str], Tensor]


def kept_tensors(work: Work) -> Kept:
    """Return the tensors with a graph in attributes of the work's modules, by module, submodule and name."""
    parts = ((index, path, part) for index, module in enumerate(work.modules) for path, part in module.named_modules())
    attributes = (((index, path, name), v) for index, path, part in parts for name, v in part.__dict__.items())
    return {place: v for place, v in attributes if isinstance(v, Tensor) and v.grad_fn is not None}


def check_closed(output: Any, leaves: Sequence[Tensor] | None, work: Work, before: Kept, name: str) -> None:
    """Refuse a tile from whose graph gradients would be lost.

    Args:
        output: What the run of the tile returned.
        leaves: The leaves that its graph may have, arguments and weights; ``None`` for any.
        work: What ran.
        before: Its :func:`kept_tensors` before the run.
        name: The name in messages.

    Raises:
        NotPositionWiseError: If the output depends on another leaf, or the run kept a tensor with a graph in an
            attribute that the output does not depend on, as for an auxiliary loss.
    """
    ends = [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
    nodes = check_leaves(ends, None if leaves is None else {id(leaf) for leaf in leaves}, name)
    for (index, path, attribute), value in kept_tensors(work).items():
        # What the output depends on (a normalized weight) is computed in each run.
        if value is not before.get((index, path, attribute)) and value.grad_fn not in nodes:
            where = f"{path}.{attribute}" if path else attribute
            raise NotPositionWiseError(
                f"{name}: it keeps a tensor with a graph in its attribute {where}, which would be that of one tile."
                f" Return it as an output instead. {REMEDY}"
            )
