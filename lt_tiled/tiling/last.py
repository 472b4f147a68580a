"""What the first tile of a call shows, and the last projection, which a recomputed tile leaves out.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So where a tile returns the output of an
``nn.Linear`` as it is, its recompute ends at that module, and the two products of the module's backward pass are
computed without autograd. The first call finds the module, and each forward pass sees that it is what made the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.modules.patch import is_of
from lt_tiled.recompute.compare import Samples
from lt_tiled.tiling.call import Plan, TiledCall
from lt_tiled.tiling.cut import Layout, flatten
from lt_tiled.tiling.recompute import PlainSavedTensors, RandomState, hidden_from_modes, random_state_kept
from lt_tiled.tiling.weights import Entry, GradientSum

FORWARD = "_lt_tiled_last"
"""The attribute of a patched projection that holds what runs in place of its own forward."""
Root = tuple[Tensor | GradientEdge, Tensor]
"""Where the graph of a tile ends, and the gradient there."""


class _Stop(BaseException):
    """Ends the recompute of a tile. The module's own code does not catch it as an error."""


class LastProjection:
    """While tiles run, sees the input of their last projection, if they have one.

    Args:
        linear: The projection.
        samples: What takes fingerprints of the inputs.
        sums: In a recompute, whose tiles end at the projection: the gradient sum of each leaf.
    """

    def __init__(
        self, linear: nn.Linear | None, samples: Samples | None, sums: Mapping[Tensor, GradientSum] | None = None
    ) -> None:
        self.linear: Any = linear
        self._samples, self._sums = samples, sums
        if linear is not None:
            self._weight, self._bias = linear.weight, linear.bias
        self._input: Tensor | None = None
        """The input in the tile that ended at the projection, ``[..., in]``."""
        self._rows: Any = None
        """The same without a graph, ``[t, in]``."""
        self._output: Tensor | None = None
        self.calls = 0
        """Those in the tile that ran."""
        self._cast: Any = None
        """The weight in the dtype of the gradients."""

    def entries(self) -> list[Entry]:
        """Return the entry with which it stands in place of the projection."""
        if self.linear is None:
            return []
        # A patched one is asked for below its patches.
        name = FORWARD if "forward" in self.linear.__dict__ else "forward"
        return [(self.linear.__dict__, name, self._forward)]

    def run(self, run: Callable[..., Any], tile: Sequence[Tensor]) -> Any:
        """Run a tile; return its output, or ``None`` if it ended at the projection."""
        self.calls = 0
        try:
            return run(*tile)
        except _Stop:
            return None

    def _forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            # Code that computes without a graph here, as in a reentrant checkpoint, does it again with one.
            stops = self._sums is not None and torch.is_grad_enabled()
            rows = input.detach().flatten(0, -2) if stops else input
            if self._samples is not None:
                self._samples.take((rows,))  # here, because code may change it in place later
            if stops:
                self._input, self._rows = input, rows
                raise _Stop
        output = nn.Linear.forward(self.linear, input)
        # Code may have put other weights in the place of its own, by functional_call.
        own = self.linear.weight is self._weight and self.linear.bias is self._bias
        self._output = output if own else None
        return output

    def made(self, output: Any) -> bool:
        """Whether the projection ran once, and its output is that of the tile, unchanged."""
        own, self._output = self._output, None
        return own is not None and own is output and self.calls == 1 and (own.is_inference() or own._version == 0)

    def roots(self, gradient: Tensor | None) -> list[Root]:
        """Add the gradients of weight and bias to their sums, given that of the output, ``[..., out]``.

        Returns:
            Where the rest of the tile's graph ends, with its gradient.
        """
        input, rows = self._input, self._rows
        self._input = self._rows = None
        if gradient is None or input is None or self._sums is None:
            return []
        before = gradient.flatten(0, -2)  # [t, out]
        dtype = before.dtype  # autocast's, if it was enabled there
        weight, bias = self.linear.weight, self.linear.bias
        if weight in self._sums:
            self._sums[weight].add_product(before.t(), rows.to(dtype))
        if bias is not None and bias in self._sums:
            self._sums[bias].add(before.sum(0))
        if not input.requires_grad:
            return []
        # An edge, which does not keep the input in memory: no gradient needs its values any more.
        if self._cast is None or self._cast.dtype != dtype:
            self._cast = weight.detach().to(dtype)
        return [(get_gradient_edge(input), before.mm(self._cast).view_as(input).to(input.dtype))]


def find_plan(call: TiledCall, inputs: Sequence[Tensor]) -> Plan:
    """Run the first tile of the first call of a kind, and return what it shows.

    Raises:
        NotPositionWiseError: If an output is not per token.
    """
    seen: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        # A hook of the module would read what is left out.
        if type(module) is nn.Linear and len(args) == 1 and not module._forward_hooks:
            seen.append((module, output))

    before = RandomState.now(call.device)
    # With a graph, because a hook of the code on the output would read what is left out.
    with_graph = torch.set_grad_enabled(call.differentiable)
    with hidden_from_modes(inputs[0]), random_state_kept(call.device), PlainSavedTensors(), with_graph:
        leaves = [t.detach().requires_grad_(wants) for t, wants in zip(inputs, call.wants_grad, strict=True)]
        with register_module_forward_hook(note):
            output = call.run(*next(call.tiles(leaves)))
        draws = not RandomState.now(call.device).same_as(before)
    # 1. How outputs go together.
    outputs, tree = flatten(output)
    layout = Layout.of(outputs, tree, call.tokens, call.bounds[0][1], call.name)
    # 2. The last projection. One that is tiled itself runs in tiles without its hooks.
    made = [module for module, own in seen if own is output and not has_users_hooks(own)]
    own = call.function.modules[-1]
    last = own if type(own) is nn.Linear else (made[0] if made else None)
    plain = last is not None and not (output.is_complex() or is_traceable_wrapper_subclass(last.weight))
    if call.tiled.tiling.compile is not False or not plain:
        last = None
    # 3. What a pending output is like. A second use of what draws random numbers would draw others.
    single = None
    if isinstance(output, Tensor) and not layout.flat[0] and not draws:
        single = output.shape[len(call.tokens.lead) :], output.dtype
    return Plan(last, layout, single)  # type: ignore[arg-type]


def has_users_hooks(tensor: Tensor) -> bool:
    """Whether code set a hook on a tensor; those of torch follow modules."""
    return any(not is_of(hook, ("torch.",)) for hook in (tensor._backward_hooks or {}).values())
