"""What the first tile of a call shows, and the last projection, which a recomputed tile leaves out.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So where a tile returns the output of an
``nn.Linear`` as it is, its recompute does not compute it: :class:`_LeftOut` returns zeros without memory, and adds the
product for the weight to its gradient sum. The first call finds the module, and each pass sees that its output is that
of the tile, unchanged and without a hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
        self.input: Any = None
        """Its input there, ``[..., in]``, without a graph."""
        self._version = 0
        self._output: Tensor | None = None
        """What it returned there."""
        self.cast: Any = None
        """The weight in the dtype of the gradients."""

    def entries(self) -> list[Entry]:
        """Return the entry with which it stands in place of the projection."""
        if self.linear is None:
            return []
        # A patched one is asked for below its patches.
        name = FORWARD if "forward" in self.linear.__dict__ else "forward"
        return [(self.linear.__dict__, name, self._forward)]

    def _forward(self, input: Tensor) -> Tensor:
        linear = self.linear
        self.calls += 1
        # A checkpoint inside of the tile may run it again in the backward pass.
        if self.calls > 1:
            return nn.Linear.forward(linear, input)
        self.input = input.detach()
        self._version = input._version
        if self.prints is not None:
            self.prints.take([self.input])
            self.prints.take_weight(linear.weight)
        if self.sums is None:
            self._output = nn.Linear.forward(linear, input)
        else:
            self._output = _LeftOut.apply(self, input, linear.weight, linear.bias)
        return self._output

    def made(self, output: Any) -> bool:
        """Whether the projection ran once in the tile that ran, and its output is that of the tile, both unchanged."""
        own = self._output
        self._output = None
        if own is None or own is not output or self.calls != 1:
            return False
        unchanged = own._version == 0 and self.input._version == self._version
        if self.sums is None:
            self.input = None
        return unchanged and not (own._backward_hooks and has_users_hooks(own))


class _LeftOut(torch.autograd.Function):
    """The last projection without its output: see NOTE [What the recompute leaves out]."""

    @staticmethod
    def forward(ctx: Any, last: LastProjection, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.last = last
        kind = input.device.type
        dtype = input.dtype
        # Autocast leaves float64 as it is.
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return input.new_zeros((), dtype=dtype).expand(*input.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        last = ctx.last
        weight = last.linear.weight
        input = last.input
        last.input = None
        before = gradient.flatten(0, -2)  # [t, out]
        dtype = before.dtype  # autocast's, if it was enabled there
        # 1. The gradients of weight and bias go to their sums.
        if weight in last.sums:
            last.sums[weight].add_product(before.t(), input.flatten(0, -2).to(dtype))
        if last.linear.bias in last.sums:
            last.sums[last.linear.bias].add(before.sum(0))
        # 2. That of the input goes on.
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        if last.cast is None or last.cast.dtype != dtype:
            last.cast = weight.detach().to(dtype)
        return None, before.mm(last.cast).view_as(input).to(input.dtype), None, None


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
