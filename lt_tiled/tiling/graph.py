"""The graph of a tile must begin at the arguments and weights, and end at the outputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
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


class GraphRecorder(TorchFunctionMode):
    """Follows the tensors with a graph that torch's functions return, and keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()
        self._returned: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.grad_fn is not None:
            self._returned.append(weakref.ref(result))
        return result

    def kept(self, work: Work) -> list[Tensor]:
        """Return those that are alive, but for those that attributes of the work's modules depend on."""
        if all(reference() is None for reference in self._returned):
            return []
        gc.collect()  # what refers to itself
        known = check_leaves([t.grad_fn for t in kept_tensors(work).values()], None, "")
        alive = [tensor for reference in self._returned if (tensor := reference()) is not None]
        return [tensor for tensor in alive if tensor.grad_fn not in known]
