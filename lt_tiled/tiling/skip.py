"""Leaving out the last projection of a recomputed tile.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So where a tile returns the output of a
linear module as it is, the recompute does not compute it. :class:`LastLinear` returns a tensor without a value that
notes any use, and the two products of the module's backward pass are computed without a node of autograd. The first
forward pass with a graph finds the module. The skip is given up, and the tile recomputed in full, where the value is
used or something else is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.tiling.recompute import Precision
from lt_tiled.tiling.weights import GradientSum, Substituted, Work


class CannotSkip(Exception):
    """The value of the last projection is read, or would be computed in another way."""


def hooked(tensor: Tensor) -> bool:
    """Whether a hook on a tensor's gradient may read its value."""
    # The hooks of register_multi_grad_hook (FlopCounterMode, FSDP2) wait for the gradient and read no value.
    return any(hook.__module__ != "torch.autograd.graph" for hook in (tensor._backward_hooks or {}).values())


_GETTERS: Any = torch._C.TensorBase
_READS = {_GETTERS.requires_grad.__get__, _GETTERS.grad_fn.__get__, Tensor.register_hook}
"""What hooks of torch (FlopCounterMode, FSDP2) ask of an output, none of which is its value."""


class NotesLinear(Substituted):
    """Also notes the weight and the output of the last linear module, until anything uses the output."""

    last: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is F.linear and len(args) == 3:  # as nn.Linear calls it
            self.last = args[1], result
        elif self.last is not None and func not in _READS and any(value is self.last[1] for value in args):
            dropped = func is F.dropout and result is self.last[1]  # in evaluation it returns its input
            self.last = self.last if dropped else None
        return result

    def part_of(self, work: Work, outputs: Sequence[Any]) -> int | None:
        """Return the index among the work's parts of the linear module whose output is one of these."""
        if self.last is None or sum(output is self.last[1] for output in outputs) != 1:
            return None
        parts = [(i, part) for i, part in enumerate(work.parts) if type(part) is nn.Linear]
        found = [i for i, part in parts if part.weight is self.last[0]]
        return found[0] if len(found) == 1 else None


class LastLinear(Substituted):
    """Also leaves out the last projection of a tile, a linear module: see NOTE [What the recompute leaves out].

    Args:
        pairs: Each tensor and what is to be seen in its place.
        linear: The module.
        own: The gradient sums of its weight and bias; ``None`` for one that is absent or frozen.
        dtype: Autocast's, where it is enabled.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Tensor, Tensor]],
        linear: nn.Linear,
        own: tuple[GradientSum | None, GradientSum | None],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(pairs)
        self.unread, self._bias = linear.weight, linear.bias
        weight = self._instead(id(linear.weight), linear.weight).detach()  # that of the forward pass
        self._sums, self._dtype, self._weight = own, dtype, weight if dtype is None else weight.to(dtype)
        self._trains = any(total is not None for total in own)
        self._stand_ins: dict[Any, _StandIn] = {}
        """Shared by tiles of one size: making one takes a node of autograd."""
        self.skipped = False
        """Whether the projection was left out of the tile that runs."""
        self._input: Tensor = weight
        self._edge: Any = None
        """Where the input's graph ends. An edge, because the code may change the input in place afterwards."""
        self._version = 0
        self._output: _StandIn | None = None

    def end(self) -> None:
        """Substitute nothing any more, and leave nothing out."""
        super().end()
        self._edge = None

    def left_out(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Return what stands for the output of the projection, once for each tile."""
        if bias is not self._bias or (self._output is not None and self.skipped):
            if self._output is not None:
                self._output.read = True  # the module's own code may catch the exception
            raise CannotSkip
        self.skipped, self._input, self._version = True, input, input._version
        if input.requires_grad:
            node: Any = input.grad_fn
            self._edge = get_gradient_edge(input) if node is None else GradientEdge(node, input.output_nr)
        key = input.shape, input.dtype, input.requires_grad
        self._output = self._stand_ins.get(key)
        if self._output is None:
            self._output = self._stand_ins[key] = self._stand_in(input)
        return self._output

    def _stand_in(self, input: Any) -> _StandIn:
        dtype = self._dtype or input.dtype
        wrapped = is_traceable_wrapper_subclass(input) or is_traceable_wrapper_subclass(self._weight)
        if Precision.now(input.device).dtype != self._dtype:  # the module's own code changed it
            raise CannotSkip
        kept = input.dtype == torch.float64 and dtype != torch.float64  # autocast leaves float64 as it is
        if wrapped or kept or dtype.is_complex or self._weight.dtype != dtype:
            raise CannotSkip
        edge = torch.empty(0, device=input.device, requires_grad=input.requires_grad or self._trains)
        stand_in: _StandIn = _Unread.apply((*input.shape[:-1], self._weight.shape[0]), dtype, edge)
        return stand_in

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise if the output of the projection was or can be read, or is not what the tile returned.

        Raises:
            CannotSkip: If so.
        """
        output = self._output
        there = outputs[0] is output if len(outputs) == 1 else sum(leaf is output for leaf in outputs) == 1
        if not self.skipped or output is None or not there or output.read:
            raise CannotSkip
        if self._input._version != self._version and self._sums[0] is not None:
            raise CannotSkip
        if output._backward_hooks and hooked(output):
            raise CannotSkip

    def before(self, outputs: Sequence[Any], given: list[Tensor | None]) -> list[tuple[Any, Tensor]]:
        """Add the gradients of weight and bias to their sums, and return where the tile's graph ends, with a gradient.

        Args:
            outputs: What the tile returned, checked.
            given: The gradients of these; that of the projection is taken out.
        """
        input, edge = self._input, self._edge
        self.skipped, self._input, self._edge = False, self._weight, None
        where = 0 if len(outputs) == 1 else [leaf is self._output for leaf in outputs].index(True)
        gradient, given[where] = given[where], None
        if gradient is None:
            return []
        rows, (weight, bias) = gradient.flatten(0, -2), self._sums
        if weight is not None:
            flat = input.detach().flatten(0, -2)
            weight.add_product(rows.t(), flat if self._dtype is None else flat.to(self._dtype))
        if bias is not None:
            bias.add(rows.sum(0))
        if edge is None:
            return []
        grad = rows.mm(self._weight).view_as(input)
        return [(edge, grad if self._dtype is None else grad.to(input.dtype))]


class _StandIn(Tensor):
    """A tensor without a value, which notes each use."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    read = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, cls):
                tensor.read = True  # the module's own code may catch the exception
        raise CannotSkip


class _Unread(torch.autograd.Function):
    """Gives a stand-in a node, as the output of a projection has one."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, edge: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(_StandIn, shape, dtype=dtype, device=edge.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise CannotSkip
