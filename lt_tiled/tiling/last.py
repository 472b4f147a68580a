"""Leaving out the last projection of a recomputed tile.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So where a tile returns the output of an
``nn.Linear`` as it is, the recompute does not compute it: the module returns a tensor without a value, which raises at
any use, and the two products of its backward pass are computed without autograd. The first forward pass finds the
module. Where the value is used after all, all tiles are recomputed in full, in later calls as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.modules.patch import is_of
from lt_tiled.tiling.call import TileFunction
from lt_tiled.tiling.weights import Entry, GradientSum, swapped

FORWARD = "_lt_tiled_last"
"""The attribute of a patched projection that holds what runs in place of its own forward."""


Root = tuple[Tensor | GradientEdge, Tensor]
"""Where the graph of a tile ends, and the gradient there."""


class NotLeftOut(Exception):
    """The output of the last projection is used, or is not what the tile returns."""


class LastInput:
    """While tiles run, sees the input of their last projection, if they have one."""

    def __init__(self, linear: nn.Linear | None) -> None:
        self.linear: Any = linear
        self._input: Tensor | None = None
        self._output: Any = None

    def entries(self) -> list[Entry]:
        """Return the entry with which it stands in place of the projection."""
        if self.linear is None:
            return []
        # A patched one is asked for below its patches.
        name = FORWARD if "forward" in self.linear.__dict__ else "forward"
        return [(self.linear.__dict__, name, self._forward)]

    def _forward(self, input: Tensor) -> Tensor:
        self._input, self._output = input, nn.Linear.forward(self.linear, input)
        output: Tensor = self._output
        return output

    def input_of(self, output: Any) -> Tensor | None:
        """Return the input of the projection in the tile that ran, if that made the tile's output."""
        input, own = self._input, self._output
        self._input = self._output = None
        return input if own is output else None


def find_last(function: TileFunction, run: Callable[[], Any]) -> tuple[Any, LastInput]:
    """Run the first tile; return its output, and what sees the linear module that made it, if one did."""
    own = function.modules[-1]
    # A projection is its own last one, and runs in tiles without its hooks.
    if type(own) is nn.Linear:
        last = LastInput(own)
        with swapped(last.entries()):
            return run(), last
    seen: list[tuple[nn.Module, Any, Any]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if type(module) is nn.Linear:
            seen.append((module, args, output))

    with register_module_forward_hook(note):
        output = run()
    made = [(module, args) for module, args, own in seen if own is output]
    # A hook of the module would read what is left out.
    if len(made) != 1 or made[0][0]._forward_hooks or len(made[0][1]) != 1:
        return output, LastInput(None)
    linear, (input,) = made[0]
    last = LastInput(linear)  # type: ignore[arg-type]
    last._input, last._output = input, output
    return output, last


class LeavesOut(LastInput):
    """While a tile runs, leaves out its last projection: see NOTE [What the recompute leaves out].

    Args:
        linear: The module.
        weight: The gradient sum of its weight; ``None`` if it is frozen.
        bias: The gradient sum of its bias; ``None`` if it is frozen or absent.
        dtype: Autocast's, where it is enabled.
    """

    def __init__(
        self, linear: nn.Linear, weight: GradientSum | None, bias: GradientSum | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__(linear)
        self._rows: Tensor | None = None
        """The input, flat and without a graph."""
        self._outputs: dict[Any, _Unread] = {}
        """What stands for the output, for tiles of each size."""
        self._sums, self._dtype = (weight, bias), dtype
        self._held = linear.weight if weight is None else weight.leaf
        self._bias = linear.bias if bias is None else bias.leaf
        held = self._held.detach()
        self._is_plain = not (is_traceable_wrapper_subclass(held) or held.is_complex())  # type: ignore[unreachable]
        self._weight = held if dtype is None else held.to(dtype)

    def _forward(self, input: Tensor) -> Tensor:
        dtype, kind = self._dtype or input.dtype, input.device.type
        # The module's own code may turn autocast off, and autocast leaves float64 as it is.
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if autocast != self._dtype or self._weight.dtype != dtype or input.dtype == torch.float64 != dtype:
            raise NotLeftOut
        # It may run the projection twice, or have put other weights in their places, by functional_call.
        linear = self.linear
        if self._input is not None or linear.weight is not self._held or linear.bias is not self._bias:
            raise NotLeftOut
        wrapped: bool = is_traceable_wrapper_subclass(input)
        if wrapped or not self._is_plain:
            raise NotLeftOut
        self._input, self._version = input, input._version
        shape = (*input.shape[:-1], self._weight.shape[0])
        wants = input.requires_grad or any(total is not None for total in self._sums)
        key = shape, wants
        if key not in self._outputs:
            self._outputs[key] = _NoValue.apply(shape, dtype, torch.empty(0, device=input.device, requires_grad=wants))
        self._output = self._outputs[key]
        return self._outputs[key]

    def input_of(self, output: Any) -> Tensor:
        """Return the input of the projection in the tile that ran, ``[t, in]``, without a graph.

        Raises:
            NotLeftOut: If the tile returned something else than its output, or may have read that.
        """
        input, own = self._input, self._output
        if input is None or output is not own or own.read or input._version != self._version:
            raise NotLeftOut
        # Hooks of torch follow modules. A user's may read the value.
        for hook in (own._backward_hooks or {}).values():
            if not is_of(hook, ("torch.",)):
                raise NotLeftOut
        self._rows = input.detach().flatten(0, -2)
        return self._rows

    def roots(self, gradient: Tensor | None) -> list[Root]:
        """Add the gradients of weight and bias to their sums, given that of the output, ``[..., out]``.

        Returns:
            Where the rest of the tile's graph ends, with its gradient.
        """
        input, self._input = self._input, None
        flat, self._rows = self._rows, None
        if gradient is None or input is None or flat is None:
            return []
        rows, (weight, bias) = gradient.flatten(0, -2), self._sums  # [t, out]
        if weight is not None:
            weight.add_product(rows.t(), flat if self._dtype is None else flat.to(self._dtype))
        if bias is not None:
            bias.add(rows.sum(0))
        if not input.requires_grad:
            return []
        # An edge, which does not keep the input in memory: no gradient needs its values any more.
        return [(get_gradient_edge(input), rows.mm(self._weight).view_as(input).to(input.dtype))]


class _Unread(Tensor):
    """A tensor without a value."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    read = False
    """Whether something tried to use it: the module's own code may catch the exception."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value.read = True
        raise NotLeftOut


class _NoValue(torch.autograd.Function):
    """Gives a tensor without a value the node that the output of the projection has."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, edge: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(_Unread, shape, dtype=dtype, device=edge.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotLeftOut
