"""Leaving out the last projection of a recomputed tile.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So once the graph of a recomputed tile has
saved its last tensor, no value that follows is needed: a matrix product then returns a stand-in without memory, and
autograd still links its node. The number of saved tensors is counted in the first forward pass with a graph. The
skip is given up, and the tile recomputed in full, where a value after it would be read: by the host, by an existing
tensor, by a custom autograd Function, by other saved-tensor hooks or by hooks on the output.

Most often the last projection is a linear module whose output the tile returns as it is. Then there is nothing to
count: ``LastLinear`` (``tiling/backward.py``) returns a tensor without a value that notes any use, and the two products
of the module's backward pass are computed without a node of autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lt_tiled.tiling.recompute import SavedCounter
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.weights import Substituted

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_OUT_OF_GRAPH = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CannotSkip(Exception):
    """The graph reads values after its last known saved tensor."""


class LastProjectionSkip(TorchDispatchMode):
    """Does not compute a matrix product whose value no backward pass reads; see the note above.

    Args:
        saved: How many tensors the graph saves.
    """

    def __init__(self, saved: int) -> None:
        super().__init__()
        self.counter = SavedCounter()
        self.saved = saved
        self.skipped = False
        self.products: list[Tensor] = []
        """The stand-ins. A sum may be written to them, as in Llama 4's mixture."""
        self.seen = False

    def __enter__(self) -> LastProjectionSkip:
        self.counter.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.counter.__exit__(*exc)

    def check(self, outputs: Iterable[Any]) -> None:
        """Raise if a skipped value was or can be read.

        Raises:
            CannotSkip: If the graph saved more than was known, or a hook on an output may read it later.
        """
        read = any(isinstance(t, Tensor) and hooked(t) for t in outputs)
        if self.skipped and (self.seen or read or self.counter.count != self.saved):
            raise CannotSkip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Gradients are off inside a custom Function.
        ours = self.counter.count >= self.saved and torch.is_grad_enabled() and self.counter.innermost()
        if ours and func in _PRODUCTS:
            left, right = args[-2:]
            if not (is_traceable_wrapper_subclass(left) or is_traceable_wrapper_subclass(right)):
                self.skipped = True
                product = left.new_zeros(()).expand(*left.shape[:-1], right.shape[-1])
                self.products.append(product)
                return product
        if ours and func is aten.add_.Tensor and any(args[0] is product for product in self.products):
            return args[0]
        escapes = func is aten.detach.default or func._schema.is_mutable or _OUT_OF_GRAPH.intersection(func.tags)
        if self.skipped and (escapes or not ours):
            self.seen = True  # the module's own code may catch the exception
            raise CannotSkip
        return func(*args, **(kwargs or {}))


def hooked(tensor: Tensor) -> bool:
    """Whether a hook on a tensor's gradient may read its value."""
    # The hooks of register_multi_grad_hook (FlopCounterMode, FSDP2) wait for the gradient and read no value.
    return any(hook.__module__ != "torch.autograd.graph" for hook in (tensor._backward_hooks or {}).values())


class NotesLinear(Substituted):
    """Also notes the weight and the output of the last linear module, until anything uses the output."""

    last: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is F.linear and len(args) == 3:  # as nn.Linear calls it
            self.last = args[1], result
        elif self.last is not None and any(value is self.last[1] for value in args):
            dropped = func is F.dropout and result is self.last[1]  # in evaluation it returns its input
            self.last = self.last if dropped else None
        return result

    def part_of(self, work: Work, outputs: Sequence[Any]) -> int | None:
        """Return the index among the work's parts of the linear module whose output is one of these."""
        if self.last is None or sum(output is self.last[1] for output in outputs) != 1:
            return None
        parts = [(i, part) for i, part in enumerate(work.parts()) if type(part) is nn.Linear]
        found = [i for i, part in parts if part.weight is self.last[0]]
        return found[0] if len(found) == 1 else None
