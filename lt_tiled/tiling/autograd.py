"""The two autograd Functions of a tiled call.

NOTE [Anchor]
:class:`Anchor` saves the call's inputs before any arithmetic runs, and nothing behind it saves a tensor. So inside an
activation-checkpointed block torch's early stop ends the block's recompute at the anchor, and the tiled forward is
not recomputed. Then :class:`TiledFunction` recomputes each tile with a graph and takes its gradients with
``torch.autograd.grad``. Where a norm may be tiled together with its neighbor, the anchor also saves an empty tensor
whose shape tells what the call consists of: torch's checkpoint compares shapes and raises where the recompute joins
other modules than the forward pass did, instead of handing a call the input of another.

NOTE [Weights are inputs]
The trainable weights are inputs of :class:`TiledFunction` and their gradients are returned, summed over the tiles.
Autograd accumulates them once, so each engine's reduction hook fires exactly once for each weight and backward pass,
however many tiles there are, and no engine has to be told.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import without_compiler
from lt_tiled.tiling.call import TiledCall, Trace
from lt_tiled.tiling.compiled import LeavesInPlace
from lt_tiled.tiling.deferred import DeferredCall
from lt_tiled.tiling.graph import check_leaves
from lt_tiled.tiling.layout import each_tile, gradients_of_tiles
from lt_tiled.tiling.observe import restored
from lt_tiled.tiling.recompute import (
    PlainSavedTensors,
    RandomState,
    differ,
    hidden_from_modes,
    is_transformed,
    other_values,
    random_state_kept,
    samples_of,
    saves_elsewhere,
)
from lt_tiled.tiling.skip import CannotSkip, LastLinear
from lt_tiled.tiling.weights import Substituted, differentiate, paired


class Anchor(torch.autograd.Function):
    """Passes a call's tensors through and is the one node that saves them."""

    @staticmethod
    def forward(ctx: Any, wants_grad: Sequence[bool], link: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.wants_grad = [False] * (len(tensors) - len(wants_grad)) + list(wants_grad)
        passed = [t for t, wants in zip(tensors, ctx.wants_grad, strict=True) if wants]
        return tuple(t.view_as(t) for t in (passed if link is None else [link]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = iter(gradients)
        return (None, None, *(next(given) if wants else None for wants in ctx.wants_grad))


class TiledFunction(torch.autograd.Function):
    """Runs a call; its inputs are the anchor's outputs, then the trainable weights."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, inputs: list[Tensor], traces: list[Trace], like: Any, *edges: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.anchor, ctx.traces = call, edges[0].grad_fn, traces
        if like is not None:
            return DeferredCall.of(call, inputs, traces, *like)
        leaves, trace = call.forward(inputs, learn=True)
        traces.append(trace)
        return tuple(leaves)

    @staticmethod
    @without_compiler
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: TiledCall = ctx.call
        batched = False
        for gradient in gradients:  # no public name tells those of is_grads_batched=True
            if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
                batched = True
        if torch.is_grad_enabled() or is_transformed() or batched:
            raise RuntimeError(
                f"{call.patch.name}: a backward pass through tiles cannot be differentiated, transformed or batched"
                " (create_graph, is_grads_batched): call lt_tiled.untile() on the module, or set tiling=False."
            )
        try:
            saved = ctx.anchor.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                f"{call.patch.name}: an argument of the tiled module was changed in place between its forward and its"
                " backward pass, which computes with it again. Make the change out of place, or lt_tiled.untile() the"
                " module."
            ) from error
        inputs = saved[-len(call.wants_grad) :]
        trace = ctx.traces[0] if ctx.traces else call.forward(inputs, learn=True)[1]
        found = backward(call, trace, inputs, gradients)
        link = [] if any(call.wants_grad) else [None]
        call.refuse_hooks_without_gradient(found)
        return (None, None, None, None, *link, *found)


def run_tiled(call: TiledCall, inputs: list[Tensor]) -> Any:
    """Run a call tile by tile."""
    _note(call)
    if not call.differentiable:
        leaves, trace = call.forward(inputs, learn=False)
        return pytree.tree_unflatten(leaves, trace.layout.tree)
    traces: list[Trace] = []
    leaves = _apply(call, inputs, traces, None)
    return pytree.tree_unflatten(leaves, traces[0].layout.tree)


def defer(call: TiledCall, inputs: list[Tensor]) -> DeferredCall | None:
    """Return a tensor that runs the call on first use, or ``None``: see :meth:`TiledCall.signature`."""
    like = call.signature(inputs)
    if like is None:
        return None
    _note(call)
    deferred: DeferredCall = _apply(call, inputs, [], like)
    return deferred


def _note(call: TiledCall) -> None:
    if isinstance(call.work.key, tuple) and call.work.key[0] == "norm":
        return  # a neighbor alone, without the module
    learned, tokens = call.patch.learned, call.shape.tokens
    if tokens >= learned.largest[0] and learned.largest != (tokens, len(call.bounds)):
        learned.note(tokens, call.bounds, call.patch.found.kind, str(call.patch.tiling))


def _apply(call: TiledCall, inputs: list[Tensor], traces: list[Trace], like: Any) -> Any:
    # Where no argument wants a gradient, an empty leaf ties the anchor into the graph.
    link = None if any(call.wants_grad) else torch.empty(0, device=call.device, requires_grad=True)
    told: list[Tensor] = []
    if call.patch.found.before or call.patch.found.after:
        told = [torch.empty(0, zlib.crc32(repr(call.work.key).encode()), dtype=torch.uint8)]  # no context's dtype
    edges = Anchor.apply(call.wants_grad, link, *told, *inputs)
    return TiledFunction.apply(call, inputs, traces, like, *edges, *(weight.tensor for weight in call.weights))


def backward(
    call: TiledCall, trace: Trace, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Recompute each tile with a graph and sum its gradients.

    Args:
        call: The call.
        trace: What the forward pass left.
        inputs: The tensors of the call's arguments, as in the forward pass.
        gradients: One for each leaf of the output, in the untiled shape; ``None`` for leaves without one.

    Returns:
        A gradient for each tensor argument that wants one, then one for each trainable weight.
    """
    random = random_state_kept(call.device, trace.random) if trace.random is not None else nullcontext()
    with restored(trace.modules, "its backward pass"), call.autocast.context(), random:
        return Backward(call, trace, inputs).run(gradients)


class Backward:
    """The recompute of a call's tiles, and their gradients. What is the same for all tiles is made once."""

    def __init__(self, call: TiledCall, trace: Trace, inputs: Sequence[Tensor]) -> None:
        self.call, self.trace, self.inputs = call, trace, inputs
        pairs = zip(call.wants_grad, call.per_token, strict=True)
        self._wanted = [index for index, (wants, per_token) in enumerate(pairs) if wants and per_token]
        self._sums = call.sums(inputs)
        self._there = paired(call.weights, self._sums[: len(call.weights)])
        # What code gets that does not get the leaves: see NOTE [Substitution].
        self._direct = [(total, t) for t, total in self._there if t.requires_grad]
        edges = [s.edge for s in self._sums]
        self._targets, self._own = (*edges, *(t for _, t in self._direct)), len(self._wanted) + len(edges)
        self._pairs = [(t, total.leaf) for t, total in self._there]
        self._mode = self._skip()
        self._outside, self._run_work = call.autocast.disabled(), call.runner()
        self._known: set[int] | None = None
        """The leaves that the graph of the first tile may have."""

    def _skip(self) -> LastLinear | Substituted | LeavesInPlace:
        """Return the mode in which tiles are recomputed: without the last projection if that is known to work."""
        if self.call.compiles:
            count = len(self.call.weights)
            return LeavesInPlace(self.call.weights, [total.leaf for total in self._sums[:count]])
        last = self.call.patch.learned.last.get(self.call.key)
        linear = None if last is None else self.call.work.parts[last]
        if type(linear) is not nn.Linear:  # it may be another module since
            return Substituted(self._pairs)
        sums = {id(t): total for t, total in self._there}
        own = sums.get(id(linear.weight)), sums.get(id(linear.bias))
        return LastLinear(self._pairs, linear, own, self.call.autocast.dtype)

    def _skip_no_more(self) -> None:
        """Recompute tiles in full, in later steps as well."""
        self.call.patch.learned.last[self.call.key] = None
        self._mode.end()
        self._mode = Substituted(self._pairs)

    def run(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all tiles, and return what :func:`backward` does."""
        call, inputs, bounds = self.call, self.inputs, self.call.bounds
        results = [inputs[i].new_empty(inputs[i].shape) for i in self._wanted]
        parts = [call.shape.tiles(result, bounds) for result in results]
        given = gradients_of_tiles(gradients, self.trace.layout, call.shape, bounds)
        # The compiler may compile a tile twice, with other rounding.
        if self.trace.samples[1] and not call.compiles and call.due():
            self._compare()
        try:
            # An offloader's hooks must not see a tile; without hooks, hiding costs time for nothing.
            with torch.enable_grad(), PlainSavedTensors() if saves_elsewhere() else nullcontext():
                own_leaves, direct = [s.leaf for s in self._sums], [t for _, t in self._direct]
                leaves = call.leaves(inputs, own_leaves[len(call.weights) :])
                held = [t for part in call.work.parts for t in (*part._parameters.values(), *part._buffers.values())]
                self._known = {id(t) for t in (*leaves, *own_leaves, *direct, *held)}
                tiles = call.tiles(leaves)
                for tile, own, into in each_tile(zip(tiles, rows_of(given), rows_of(parts))):  # noqa: B905
                    self._tile(tile, list(own), into)
        finally:
            self._mode.end()
        totals, zeros = iter(self._sums), call.patch.needs.zeros_for_unused
        of_weights = [next(totals).take(zeros) for _ in call.weights]
        found, pairs = iter(results), zip(call.wants_grad, call.per_token, strict=True)
        arguments = [next(found) if per_token else next(totals).take() for wants, per_token in pairs if wants]
        return [*arguments, *of_weights]

    def _compare(self) -> None:
        """Refuse a recompute that computes other outputs than the forward pass: see NOTE [What no observation sees]."""
        given, returned = self.trace.samples
        now = samples_of(list(self.inputs))
        if any(map(differ, given, now)):
            return
        with (
            hidden_from_modes(returned[0]),
            random_state_kept(self.call.device),
            torch.no_grad(),
            PlainSavedTensors(),
            Substituted(self._pairs),
        ):
            output = self.call.run_views(next(self.call.tiles([t.detach() for t in self.inputs])))
        if any(map(differ, returned, samples_of(output))):
            assert self.trace.modules is not None
            raise other_values(self.call.patch.name, "its output", self.trace.modules.remedy)

    def _tile(self, tile: Sequence[Tensor], given: list[Tensor | None], into: Sequence[Tensor]) -> None:
        """Recompute a tile, and put the gradients of its per-token arguments where they go."""
        outputs = self._recompute(tile)
        roots = self._mode.before(outputs, given) if isinstance(self._mode, LastLinear) else []
        for output, gradient in zip(outputs, given, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append((output, gradient))
        if self._known is not None:  # in each backward pass: what was frozen, or not used, in the first call counts too
            nodes = [end.node if isinstance(end, GradientEdge) else end.grad_fn for end, _ in roots]
            check_leaves([node for node in nodes if node is not None], self._known, self.call.patch.name)
            self._known = None
        targets = (*[tile[index] for index in self._wanted], *self._targets)
        found: Sequence[Tensor | None] = [None] * len(targets)
        if roots and targets:
            ends, grads = zip(*roots)  # noqa: B905
            with self._outside:  # as the untiled backward pass
                found = differentiate(self._sums, ends, targets, grads)
        for tensor in tile:
            if tensor._backward_hooks:  # all tiles come from one node, which would call them for each later tile
                tensor._backward_hooks.clear()
        for part, gradient in zip(into, found):  # noqa: B905
            part.zero_() if gradient is None else part.copy_(gradient)
        for (total, tensor), gradient in zip(self._direct, found[self._own :]):  # noqa: B905
            if gradient is not None:
                total.add_direct(tensor, gradient, self.call.patch.name)

    def _recompute(self, tile: Sequence[Tensor]) -> Sequence[Any]:
        """Run a tile with a graph, and return the leaves of its output."""
        start = None if self.trace.random is None else RandomState.now(self.call.device)
        mode = self._mode
        if isinstance(mode, LastLinear):
            try:
                outputs = self._run(tile)
                mode.check(outputs)
                return outputs
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not (mode.skipped or isinstance(error, CannotSkip)):  # the tile's code failed by itself
                    raise
            self._skip_no_more()
            if start is not None:
                start.set()
        return self._run(tile)

    def _run(self, tile: Sequence[Tensor]) -> list[Any]:
        with self._mode:
            output = self._run_work(tile)
        return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)


def rows_of(columns: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of all columns for one tile after the other."""
    return zip(*columns) if columns else repeat(())  # noqa: B905  # some repeat one entry
