"""Leaving out the last projection of a recomputed tile.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So once the graph of a recomputed tile has
saved its last tensor, no value that follows is needed: a matrix product then returns a stand-in without memory, and
autograd still links its node. The number of saved tensors is counted in the first forward pass with a graph. The
skip is given up, and the tile recomputed in full, where a value after it would be read: by the host, by an existing
tensor, by a custom autograd Function, by other saved-tensor hooks or by hooks on the output.

Most often the last projection is a linear module whose output the tile returns as it is. Then there is nothing to
count: :class:`LastLinear` stands in for the module, its output is a tensor without a value that notes any use, and the
two products of its backward pass are computed without a node of autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lt_tiled.tiling.recompute import SavedCounter, entry
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.weights import GradientSum, Substituted

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
        hooked = any(isinstance(t, Tensor) and _hooked(t) for t in outputs)
        if self.skipped and (self.seen or hooked or self.counter.count != self.saved):
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


def _hooked(tensor: Tensor) -> bool:
    """Whether a hook on a tensor's gradient may read its value."""
    # The hooks of register_multi_grad_hook (FlopCounterMode, FSDP2) wait for the gradient and read no value.
    hooks = tensor._backward_hooks
    return bool(hooks) and any(hook.__module__ != "torch.autograd.graph" for hook in hooks.values())


_linear = F.linear  # DeepSpeed replaces it


class NotesLinear(Substituted):
    """Also notes the weight and the output of the last linear module, until anything uses the output."""

    last: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is _linear and len(args) == 3:  # as nn.Linear calls it
            self.last = args[1], result
        elif self.last is not None and any(value is self.last[1] for value in args):
            dropped = func is F.dropout and result is self.last[1]  # of nothing
            self.last = self.last if dropped else None
        return result

    def part_of(self, work: Work, outputs: Sequence[Any]) -> int | None:
        """Return the index among the work's parts of the linear module whose output is one of these."""
        if self.last is None or sum(output is self.last[1] for output in outputs) != 1:
            return None
        held = [(part._parameters, part.__dict__) if type(part) is nn.Linear else () for part in work.parts()]
        weight = self.last[0]
        found = [i for i, holders in enumerate(held) if any(entry(holder, "weight") is weight for holder in holders)]
        return found[0] if len(found) == 1 else None


class LastLinear:
    """The last projection of the tiles of a backward pass, as a linear module: see the note above.

    Args:
        linear: A copy of the module.
        sums: Those of the gradients of its weight and its bias, if it has them and they are wanted.
        dtype: Autocast's, where it is enabled.
    """

    def __init__(
        self, linear: nn.Module, sums: tuple[GradientSum | None, GradientSum | None], dtype: torch.dtype | None
    ) -> None:
        weight: Any = linear.weight
        self._linear, self._sums, self._dtype = linear, sums, dtype
        self._weight = weight.detach() if dtype is None else weight.detach().to(dtype)
        self._trains = any(total is not None for total in sums)
        self._stand_ins: dict[Any, _StandIn] = {}
        self._input: Tensor | None = None
        self._output: _StandIn | None = None
        linear.__dict__["forward"] = self._forward

    def end(self) -> bool:
        """Let the copy compute again; return whether this tile had a stand-in."""
        del self._linear.__dict__["forward"]
        seen, self._input = self._input is not None, None
        return seen

    def _forward(self, input: Tensor) -> Tensor:
        if self._input is not None:
            raise CannotSkip
        key = input.shape, input.dtype, input.requires_grad
        if key not in self._stand_ins:
            self._stand_ins[key] = self._stand_in(input)
        self._input, self._output = input, self._stand_ins[key]
        return self._output

    def _stand_in(self, input: Tensor) -> _StandIn:
        dtype = self._dtype or input.dtype
        wrapped = is_traceable_wrapper_subclass(input) or is_traceable_wrapper_subclass(self._weight)
        if wrapped or self._weight.dtype != dtype or input.dtype == torch.float64 != dtype:
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
        there = sum(leaf is output for leaf in outputs) == 1
        if self._input is None or output is None or not there or output.read or _hooked(output):
            raise CannotSkip

    def before(self, outputs: Sequence[Any], given: list[Tensor | None]) -> list[tuple[Any, Tensor]]:
        """Add the gradients of weight and bias to their sums, and return where the tile's graph ends, with a gradient.

        Args:
            outputs: What the tile returned, checked.
            given: The gradients of these; that of the projection is taken out.
        """
        where = next(index for index, leaf in enumerate(outputs) if leaf is self._output)
        input = self._input
        assert input is not None
        gradient, given[where] = given[where], None
        self._input = None
        if gradient is None:
            return []
        rows, (weight, bias) = gradient.reshape(-1, gradient.shape[-1]), self._sums
        if weight is not None:
            flat = input.detach().reshape(-1, input.shape[-1])
            weight.add_product(rows.t(), flat if self._dtype is None else flat.to(self._dtype))
        if bias is not None:
            bias.add(rows.sum(0))
        if not input.requires_grad:
            return []
        slope = rows.mm(self._weight).view(input.shape)
        # An edge, not the input, which is not needed any more.
        edge = GradientEdge(input.grad_fn, input.output_nr)
        return [(edge, slope if self._dtype is None else slope.to(input.dtype))]


class _StandIn(Tensor):
    """A tensor without a value, which notes each use."""

    __torch_function__ = torch._C._disabled_torch_function_impl
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
