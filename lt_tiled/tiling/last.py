"""What the first tile of a call shows, and the last projection, which a recomputed tile leaves out.

NOTE [What the recompute leaves out]
The backward pass of a matrix product reads its inputs and not its output. So where a tile returns the output of an
``nn.Linear`` as it is, its recompute does not compute it: :class:`_LeftOut` returns zeros without memory. The first
call finds the module, and each pass sees that its output is that of the tile, unchanged and without a hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.modules.patch import is_of
from lt_tiled.recompute.compare import EPS, Fingerprints
from lt_tiled.recompute.mode import PlainSavedTensors, RandomState, hidden_from_modes, random_state_kept
from lt_tiled.tiling.call import Plan, TiledCall
from lt_tiled.tiling.cut import Assembly
from lt_tiled.tiling.weights import Entry


class TileWatch:
    """What one pass over the tiles of a call computes: takes fingerprints, and sees the last projection.

    Args:
        call: The call.
        last: Its last projection, if a recompute leaves it out.
        compared: Whether to take fingerprints: of the tiles' outputs, or of the inputs of the last projection.
        leaves_out: Whether it is a recompute.
    """

    def __init__(self, call: TiledCall, last: nn.Linear | None, compared: bool, leaves_out: bool = False) -> None:
        self.call = call
        self.last: Any = last
        self.leaves_out = leaves_out
        self.prints: Fingerprints | None = None
        if compared:
            raises = call.function.tiling.compare == "raise"
            remedy = "lt_tiled.untile() it"
            self.prints = Fingerprints(call.name, remedy, raises, len(call.sizes), call.precision.dtype)
        self.as_planned = True
        """Whether the last projection made the output of each tile so far, as in the first call of this kind."""
        self.calls = 0
        """Those of the projection in the tile that runs."""
        self._input: Any = None
        self._version = 0
        self._output: Tensor | None = None
        """What it returned there."""
        self.cast_of: Any = None
        self.cast: Any = None
        """Its weight, and that in the dtype of the gradients."""

    def entries(self) -> list[Entry]:
        """Return the entry with which it stands in place of the projection."""
        if self.last is None:
            return []
        call = self.call
        if "forward" not in self.last.__dict__:
            return [(self.last.__dict__, "forward", self._forward)]
        # A projection with tiles of its own runs below its patches.
        if self.last is call.function.root and getattr(call.own, "__func__", None) is nn.Linear.forward:
            return [(vars(call), "own", self._forward)]
        return []

    def run(self, tile: Sequence[Tensor]) -> Any:
        """Run a tile, and return its output."""
        self.calls = 0
        output = self.call.run(*tile)
        if self.last is None:
            for place, leaf in enumerate(pytree.tree_leaves(output)):
                if self.prints is not None and isinstance(leaf, Tensor) and leaf.dtype in EPS:
                    self.prints.take(place, leaf)
            return output
        own = self._output
        self._output = None
        # It ran once, and neither its input nor its output was changed since, or has a hook.
        as_planned = own is not None and own is output and self.calls == 1
        if own is not None and as_planned:
            as_planned = own._version == 0 and self._input._version == self._version
            as_planned = as_planned and not (own._backward_hooks and has_users_hooks(own))
        self.as_planned = self.as_planned and as_planned
        self._input = None
        return output

    def _forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        # A checkpoint inside of the tile may run it again in the backward pass.
        if self.calls > 1:
            return nn.Linear.forward(self.last, input)
        self._input = input
        self._version = input._version
        if self.prints is not None:
            self.prints.take(0, input)
            # Its weight, once: what the recompute leaves out shows no change of that.
            if -1 not in self.prints.taken:
                self.prints.take(-1, self.last.weight)
        if self.leaves_out:
            self._output = _LeftOut.apply(self, input, self.last.weight, self.last.bias)
        else:
            self._output = nn.Linear.forward(self.last, input)
        return self._output


class _LeftOut(torch.autograd.Function):
    """The last projection without its output: see NOTE [What the recompute leaves out]."""

    @staticmethod
    def forward(ctx: Any, watch: TileWatch, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.watch = watch
        # As attributes: a checkpoint inside of the tile counts what is saved.
        ctx.input = input.detach()
        ctx.weight = weight
        kind = input.device.type
        dtype = input.dtype
        # Autocast leaves float64 as it is.
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return input.new_zeros((), dtype=dtype).expand(*input.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        watch = ctx.watch
        input = ctx.input
        ctx.input = None
        before = gradient.flatten(0, -2)  # [t, out]
        of_input: Tensor | None = None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        # The dtype of the gradient is that of the product: autocast's, if it was enabled there.
        if ctx.needs_input_grad[2]:
            of_weight = before.t().mm(input.flatten(0, -2).to(before.dtype))
        if ctx.needs_input_grad[3]:
            of_bias = before.sum(0)
        if ctx.needs_input_grad[1]:
            if watch.cast_of is not ctx.weight:
                watch.cast_of = ctx.weight
                watch.cast = ctx.weight.detach().to(before.dtype)
            of_input = before.mm(watch.cast).view_as(input)
        return None, of_input, of_weight, of_bias


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
    compiled = call.function.tiling.compile is not False
    before = RandomState.now(call.device)
    with_graph = torch.set_grad_enabled(call.differentiable and not compiled)
    with hidden_from_modes(inputs[0]), random_state_kept(call.device), PlainSavedTensors(), with_graph:
        leaves = [t.detach().requires_grad_(wants) for t, wants in zip(inputs, call.wants_grad, strict=True)]
        with register_module_forward_hook(note):
            output = call.run(*next(call.tiles(leaves)))
        draws = not RandomState.now(call.device).same_as(before)
    # 2. Outputs that are not per token are refused.
    assembly = Assembly(call.tokens, call.sizes, call.name)
    for index, leaf in enumerate(pytree.tree_leaves(output)):
        shape = assembly.whole_shape(index, leaf)
    # 3. The last projection. One that is tiled itself runs in tiles without its hooks.
    last: Any = call.function.root
    if type(last) is not nn.Linear:
        last = None
        for module, made in seen:
            if made is output and module in call.function.parts and not has_users_hooks(made):
                last = module
    if compiled or last is None or output.is_complex() or is_traceable_wrapper_subclass(last.weight):
        last = None
    # 4. What a pending output is like. A second use of what draws random numbers would draw others.
    single = None
    lead = call.tokens.lead
    if isinstance(output, Tensor) and shape[: len(lead)] == lead and not draws:
        single = (shape[len(lead) :], output.dtype)
    return Plan(last, single)


def has_users_hooks(tensor: Tensor) -> bool:
    """Whether code set a hook on a tensor; those of torch's tools follow modules."""
    return any(not is_of(hook, ("torch.autograd.", "torch.utils.")) for hook in (tensor._backward_hooks or {}).values())
