"""What the first tile of a call shows, and the last projection, which a recomputed tile leaves out.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So where a tile returns the output of an
``nn.Linear`` as it is, its recompute does not compute it: the module returns zeros without memory, and the two products
of its backward pass are computed without autograd. The first call finds the module, and each pass sees that its output
is that of the tile, unchanged and without a hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.modules.patch import is_of
from lt_tiled.recompute.compare import TileFingerprints
from lt_tiled.recompute.mode import PlainSavedTensors, RandomState, hidden_from_modes, random_state_kept
from lt_tiled.tiling.call import Plan, TiledCall
from lt_tiled.tiling.cut import Layout, flatten
from lt_tiled.tiling.weights import Entry, GradientSum

FORWARD = "_lt_tiled_last"
"""The attribute of a patched projection that holds what runs in place of its own forward."""
Root = tuple[Tensor | GradientEdge, Tensor]
"""Where the graph of a tile ends, and the gradient there."""


class LastProjection:
    """While tiles run, sees their last projection, if they have one.

    Args:
        linear: The projection.
        prints: What takes fingerprints of its inputs.
        sums: In a recompute, which leaves it out: the gradient sum of each leaf.
    """

    def __init__(
        self,
        linear: nn.Linear | None,
        prints: TileFingerprints | None,
        sums: Mapping[Tensor, GradientSum] | None = None,
    ) -> None:
        self.linear: Any = linear
        self.prints = prints
        self.sums = sums
        self.calls = 0
        """Those in the tile that runs."""
        self._own = (getattr(linear, "weight", None), getattr(linear, "bias", None))
        self._output: Tensor | None = None
        """What it returned in the tile that runs."""
        self._input: Any = None
        """Its input there, ``[..., in]``, without a graph."""
        self._instead: dict[Any, Tensor] = {}
        """What a recompute returns in place of the output, for tiles of each shape."""
        self._version = 0
        self._edge: GradientEdge | None = None
        """Where the graph of that input ends. It does not keep values, which no gradient needs any more."""
        self._cast: Any = None
        """The weight in the dtype of the gradients."""

    def entries(self) -> list[Entry]:
        """Return the entry with which it stands in place of the projection."""
        if self.linear is None:
            return []
        # A patched one is asked for below its patches.
        name = FORWARD if "forward" in self.linear.__dict__ else "forward"
        return [(self.linear.__dict__, name, self._forward)]

    def _forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self._input = input.detach()
            self._version = input._version
            if self.prints is not None:
                self.prints.take([self._input])
                self.prints.take_weight(self.linear.weight)
            if self.sums is not None:
                self._edge = get_gradient_edge(input) if input.requires_grad else None
                self._output = self._without_values(input)
                return self._output
        # A checkpoint inside of the tile may run it again in the backward pass.
        output = nn.Linear.forward(self.linear, input)
        # Code may have put other weights in the place of its own, by functional_call.
        if self.linear.weight is self._own[0] and self.linear.bias is self._own[1]:
            self._output = output
        return output

    def _without_values(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = input.dtype
        # Autocast leaves float64 as it is.
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        key = (input.shape, dtype)
        if key not in self._instead:
            shape = (*input.shape[:-1], self.linear.weight.shape[0])
            self._instead[key] = input.new_zeros((), dtype=dtype).expand(shape).requires_grad_()
        return self._instead[key]

    def made(self, output: Any) -> bool:
        """Whether the projection ran once in the tile that ran, and its output is that of the tile, both unchanged."""
        own = self._output
        self._output = None
        if own is None or own is not output or self.calls != 1:
            return False
        if own._version > 0 or self._input._version != self._version:
            return False
        if self.sums is None:
            self._input = None
        return not (own._backward_hooks and has_users_hooks(own))

    def roots(self, gradient: Tensor | None) -> list[Root]:
        """Add the gradients of weight and bias to their sums, given that of the output, ``[..., out]``.

        Returns:
            Where the rest of the tile's graph ends, with its gradient.
        """
        input = self._input
        self._input = None
        if gradient is None or self.sums is None:
            return []
        before = gradient.flatten(0, -2)  # [t, out]
        dtype = before.dtype  # autocast's, if it was enabled there
        weight = self.sums.get(self.linear.weight)
        if weight is not None:
            weight.add_product(before.t(), input.flatten(0, -2).to(dtype))
        bias = self.sums.get(self.linear.bias)
        if bias is not None:
            bias.add(before.sum(0))
        if self._edge is None:
            return []
        if self._cast is None or self._cast.dtype != dtype:
            self._cast = self.linear.weight.detach().to(dtype)
        return [(self._edge, before.mm(self._cast).view_as(input).to(input.dtype))]


def find_plan(call: TiledCall, inputs: Sequence[Tensor]) -> Plan:
    """Run the first tile of the first call of a kind, and return what it shows.

    Raises:
        NotPositionWiseError: If an output is not per token.
    """
    seen: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        # A hook of the module would read what is left out, and a reentrant checkpoint runs without a graph first.
        plain = type(module) is nn.Linear and len(args) == 1 and not module._forward_hooks
        if plain and torch.is_grad_enabled() == call.differentiable:
            seen.append((module, output))

    # 1. A tile, with a graph, because a hook of the code on the output would read what is left out; not if tiles are
    # compiled, which leave out nothing.
    compiled = call.tiled.tiling.compile is not False
    before = RandomState.now(call.device)
    with_graph = torch.set_grad_enabled(call.differentiable and not compiled)
    with hidden_from_modes(inputs[0]), random_state_kept(call.device), PlainSavedTensors(), with_graph:
        leaves = [t.detach().requires_grad_(wants) for t, wants in zip(inputs, call.wants_grad, strict=True)]
        with register_module_forward_hook(note):
            output = call.run(*next(call.tiles(leaves)))
        draws = not RandomState.now(call.device).same_as(before)
    # 2. How outputs go together.
    outputs, tree = flatten(output)
    layout = Layout.of(outputs, tree, call.tokens, call.bounds[0][1], call.name)
    # 3. The last projection. One that is tiled itself runs in tiles without its hooks.
    last: Any = call.function.modules[-1]
    if type(last) is not nn.Linear:
        last = None
        modules = [module for module, _ in seen]
        for module, made in seen:
            once = modules.count(module) == 1 and module in call.function.parts
            if made is output and once and not has_users_hooks(made):
                last = module
    if compiled or last is None or output.is_complex() or is_traceable_wrapper_subclass(last.weight):
        last = None
    # 4. What a pending output is like. A second use of what draws random numbers would draw others.
    single = None
    if isinstance(output, Tensor) and not layout.flat[0] and not draws:
        single = (output.shape[len(call.tokens.lead) :], output.dtype)
    return Plan(last, layout, single)


def has_users_hooks(tensor: Tensor) -> bool:
    """Whether code set a hook on a tensor; those of torch's tools follow modules."""
    return any(not is_of(hook, ("torch.autograd.", "torch.utils.")) for hook in (tensor._backward_hooks or {}).values())
