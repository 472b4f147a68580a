"""How a call runs: all tiles without a graph, then each one again with a graph in the backward pass.

NOTE [Weights are inputs]
The weights are inputs of :class:`TiledFunction`, which returns one gradient for each, summed over the tiles. Autograd
accumulates them once, so each engine's hooks run exactly once for each weight and backward pass, however many tiles
there are, and no engine has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils import _pytree as pytree

from lt_tiled.recompute.compare import VERDICT, Fingerprints
from lt_tiled.recompute.mode import (
    PlainSavedTensors,
    RandomState,
    hidden_from_checkpoints,
    hooks_of_saved_tensors,
    is_real,
    random_state_kept,
)
from lt_tiled.tiling.anchor import anchored, several_ranks
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.cut import Assembly, each_tile
from lt_tiled.tiling.last import TileWatch
from lt_tiled.tiling.weights import GradientSum, check_leaves, in_places, swapped


def run_tiled(call: TiledCall, inputs: Sequence[Tensor]) -> Any:
    """Run a call tile by tile."""
    # 1. Without a backward pass the tiles run, and that is all.
    if not call.differentiable:
        outputs, trace = forward(call, inputs)
    else:
        # 2. Save the inputs and weights before any arithmetic.
        link, edges = anchored(call, inputs)
        # 3. Run all tiles without a graph; the node of this Function runs them again in the backward pass.
        box: list[Trace] = []
        outputs = TiledFunction.apply(call, box, (), link, *edges)
        trace = box[0]
    return pytree.tree_unflatten(outputs, trace.tree)


@dataclass(frozen=True)
class Trace:
    """What the forward pass of a call leaves for its backward pass."""

    random: RandomState
    """The generators' state before the forward pass."""
    last: nn.Linear | None
    """The last projection, if the recompute leaves it out."""
    prints: Fingerprints | None
    """What the tiles computed; ``None`` where tensors have no values."""
    tree: Any
    """How the outputs go together."""


class TiledFunction(torch.autograd.Function):
    """Runs a call; its inputs are the anchor's outputs: see NOTE [Weights are inputs].

    A call that may run later returns ``later``, and puts its trace into the box when it runs: see NOTE [Pending].
    """

    @staticmethod
    def forward(ctx: Any, call: TiledCall, box: list[Trace], later: Any, link: Tensor, *edges: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.anchor, ctx.box = call, link.grad_fn, box
        if later:
            return later[0]
        outputs, trace = forward(call, edges[: len(call.wants_grad)])
        box.append(trace)
        return outputs

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{call.name}: a backward pass through tiles cannot be differentiated (create_graph=True): call"
                " lt_tiled.untile() on the module, or set tiling=False."
            )
        saved = ctx.anchor.saved_tensors  # autograd refuses those that were changed in place
        # A pending output may have a gradient without having run, as of a Function that read its shape alone.
        trace = ctx.box[0] if ctx.box else forward(call, saved[: len(call.wants_grad)])[1]
        return None, None, None, None, *Recompute(call, trace, saved, given).run()


# The forward pass


@hidden_from_checkpoints()
def forward(call: TiledCall, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Trace]:
    """Run all tiles without a graph; return the outputs, and what the backward pass needs."""
    random = RandomState.now(call.device)
    assembly = Assembly(call.tokens, call.sizes, call.name)
    last = call.plan.last if call.differentiable else None
    watch = TileWatch(call, last, compared=call.differentiable and is_real(inputs[0]))
    # Graphs that the module makes for itself are hidden from an activation checkpoint around it.
    with torch.no_grad(), hidden_from_offloaders(), swapped(watch.entries()):
        for index, tile in each_tile(enumerate(call.tiles([tensor.detach() for tensor in inputs]))):
            output = watch.run(tile)
            if not watch.as_planned:
                # Its code is another one than in the first call: from now on tiles are recomputed in full.
                random.set()
                call.function.plans[call.kind] = replace(call.plan, last=None)
                return forward(call, inputs)
            assembly.add(index, output)
            del output
    return tuple(assembly.wholes), Trace(random, last, watch.prints, assembly.tree)


def hidden_from_offloaders() -> AbstractContextManager[Any]:
    """Hide the saved tensors of tiles from hooks around; without hooks, hiding costs time for nothing."""
    return nullcontext() if hooks_of_saved_tensors() is None else PlainSavedTensors()


# The backward pass


class Recompute:
    """The recompute of a call's tiles, and their gradients. What is the same for all tiles is made once.

    Args:
        call: The call.
        trace: What its forward pass left.
        saved: Its inputs and weights.
        given: A gradient for each output, in the untiled shape; ``None`` for outputs without one.
    """

    def __init__(self, call: TiledCall, trace: Trace, saved: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
        self.call = call
        self.trace = trace
        self.given = given
        count = len(call.wants_grad)
        accumulate = call.function.tiling.accumulate
        # 1. A leaf and a sum for each weight, and for each input that all tiles see whole.
        self.inputs = saved[:count]
        self.sums = [GradientSum(weight, accumulate) for weight in saved[count:]]
        self.leaves: list[Tensor] = [total.leaf for total in self.sums]
        self.wholes: list[GradientSum | None] = []
        self.results: list[Tensor | None] = []
        """Gradients of the inputs of which each tile sees a part."""
        for tensor, wants, per_token in zip(self.inputs, call.wants_grad, call.per_token, strict=True):
            whole: GradientSum | None = None
            result: Tensor | None = None
            if wants and per_token:
                result = tensor.new_zeros(tensor.shape)
            elif wants:
                whole = GradientSum(tensor, accumulate)
            self.wholes.append(whole)
            self.results.append(result)
        # 2. What leaves out the last projection, and takes fingerprints as the forward pass did.
        self.watch = TileWatch(call, trace.last, trace.prints is not None, leaves_out=True)

    def run(self) -> list[Tensor | None]:
        """Run all tiles, and return a gradient for each input and each weight."""
        call = self.call
        # 1. Random numbers, autocast and default dtype as in the forward pass; leaves in the places of weights.
        with ExitStack() as stack:
            stack.enter_context(random_state_kept(call.device, self.trace.random))
            stack.enter_context(call.precision.context())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(hidden_from_offloaders())
            stack.enter_context(swapped(in_places(call.weights.values(), self.leaves) + self.watch.entries()))
            # 2. Each tile runs again with a graph, and adds its gradients to the sums.
            self._run_tiles()
        # 3. It must have computed the same. If the last projection did not make the output, what it left out has no
        # gradient: that is refused also with compare="warn".
        if self.trace.prints is not None and self.watch.prints is not None:
            if not self.watch.as_planned:
                self.watch.prints.taken[0] = [self.inputs[0].new_empty(0)]
                self.trace.prints.raises = True
            VERDICT.add(self.trace.prints, self.watch.prints)
        # 4. One gradient for each input and weight.
        found: list[Tensor | None] = []
        for result, whole in zip(self.results, self.wholes, strict=True):
            found.append(result if whole is None else whole.take(zeros=False))
        for weight, total in zip(call.weights, self.sums, strict=True):
            # Other ranks may use a weight that no tile used, and a user's hook would see None.
            zeros = total.sum is None and (several_ranks() or bool(weight._backward_hooks))
            found.append(total.take(zeros))
        return found

    def _run_tiles(self) -> None:
        call = self.call
        # 1. The tiles of the inputs, of the gradients of outputs, and of where the gradients of inputs go.
        parts_of = Assembly(call.tokens, call.sizes, call.name).gradients
        rows = zip(call.tiles(self.inputs), parts_of(self.given), parts_of(self.results), strict=True)
        # As in the untiled backward pass.
        uncast = nullcontext() if call.precision.dtype is None else torch.autocast(call.device.type, enabled=False)
        for index, (tile, gradients, results) in each_tile(enumerate(rows)):
            # 2. The tile's graph begins at leaves, whose gradients autograd adds to those of the whole.
            leaves: list[Tensor] = []
            for tensor, wants, whole, result in zip(tile, call.wants_grad, self.wholes, results, strict=True):
                leaf = tensor.detach().requires_grad_(wants) if whole is None else whole.leaf
                if result is not None:
                    leaf.grad = result
                leaves.append(leaf)
            # 3. It runs on views: of a leaf, autocast would cache the cast, and sum its gradients in 16 bits.
            outputs = pytree.tree_leaves(self.watch.run([leaf.view_as(leaf) for leaf in leaves]))
            # 4. Its graph ends at outputs that have gradients, which go to the leaves.
            ends: tuple[Tensor, ...] = ()
            at_ends: tuple[Tensor, ...] = ()
            for output, gradient in zip(outputs, gradients, strict=True):
                if gradient is not None and output.requires_grad:
                    ends += (output,)
                    at_ends += (gradient,)
            if not ends:
                continue
            if index == 0:
                check_leaves(ends, leaves + self.leaves, call.name)  # the engine would see the gradient of each tile
            with uncast:
                # What torch.autograd.backward calls. That checks shapes first, which are right here.
                _engine_run_backward(ends, at_ends, False, False, (), allow_unreachable=True, accumulate_grad=True)
            del outputs, output, ends, at_ends
