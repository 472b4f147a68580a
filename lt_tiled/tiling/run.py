"""How a call runs: all tiles without a graph, then each one again with a graph in the backward pass.

NOTE [Anchor]
:class:`Anchor` saves the call's inputs before any arithmetic runs, and nothing behind it saves a tensor. So inside an
activation-checkpointed block torch's early stop ends the block's recompute at the anchor, and the tiles do not run once
more for it. The weights are saved, too: autograd refuses those that were changed in place before the backward pass.

NOTE [Weights are inputs]
The weights are inputs of :class:`TiledFunction`, which returns one gradient for each, summed over the tiles. Autograd
accumulates them once, so each engine's hooks run exactly once for each weight and backward pass, however many tiles
there are, and no engine has to be told.

NOTE [One order on all ranks]
ZeRO-1 and 2 copy gradients into a bucket in the order in which they arrive, and sum the buckets of all ranks entry by
entry. Ranks may run a call differently: its input is short on one of them, or has a hook. So every call passes its
weights through an anchor, also if it runs untiled: all their gradients then arrive together. A norm that runs in the
tiles of what follows it keeps an anchor of its own, as it has one if it runs alone. Autograd runs first what was
recorded last, but nodes that add to ``weight.grad`` before all others, in an order that depends on what else waits, as
the loss of an auxiliary head on one rank. So each weight goes through a node of its own before the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import without_compiler
from lt_tiled.recompute.compare import EPS, ROWS, VERDICT, Sample, fingerprint
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.cut import Assembly, each_tile
from lt_tiled.tiling.effects import check_leaves
from lt_tiled.tiling.last import LeavesOut, NotesInput, NotLeftOut, Root, find_last
from lt_tiled.tiling.recompute import (
    PlainSavedTensors,
    RandomState,
    hidden_from_checkpoints,
    is_transformed,
    random_state_kept,
    saves_elsewhere,
)
from lt_tiled.tiling.state import Plan
from lt_tiled.tiling.weights import GradientSum, in_place, one_thread, wants_zeros, weights_of

Edges = Sequence[Tensor]
"""The outputs of an anchor: a call's inputs, then its weights."""
Through = Mapping[Tensor, Tensor]
"""Weights, and the outputs of an anchor that they went through."""


def run_tiled(call: TiledCall, inputs: Sequence[Tensor], through: Through | None = None) -> Any:
    """Run a call tile by tile.

    Args:
        call: The call.
        inputs: The tensors among its arguments.
        through: The outputs of an anchor that some of its weights went through already.
    """
    if not call.differentiable:
        outputs, tree = forward(call, inputs).assembly.take()
        return pytree.tree_unflatten(outputs, tree)
    # 1. Save the inputs and weights before any arithmetic.
    link, edges = anchored(call, inputs, through or {})
    # 2. Run all tiles without a graph; the node of this Function runs them again in the backward pass.
    box: list[Any] = []
    outputs = TiledFunction.apply(call, [t.detach() for t in inputs], box, (), link, *edges)
    return pytree.tree_unflatten(outputs, box[1])


def run_later(call: TiledCall, inputs: Sequence[Tensor], through: Through, box: list[Any], output: Tensor) -> Edges:
    """Give a tensor without memory its place in the graph, as the output of a call that :func:`run_now` may run.

    Returns:
        The outputs of the call's anchor.
    """
    link, edges = anchored(call, inputs, through)
    TiledFunction.apply(call, inputs, box, [output], link, *edges)
    return edges


def run_now(call: TiledCall, inputs: Sequence[Tensor], box: list[Any]) -> Tensor:
    """Run such a call, and return its output without a graph."""
    with torch.inference_mode(False), torch.enable_grad(), call.precision.context():
        trace = forward(call, inputs)
    outputs, tree = trace.assembly.take()
    box += [trace, tree]
    return outputs[0]


def run_untiled(parts: Sequence[nn.Module], run: Callable[[], Any]) -> Any:
    """Run modules as they are, with their weights behind an anchor: see NOTE [One order on all ranks]."""
    weights = weights_of(parts)
    if not weights:
        return run()
    link = next(iter(weights)).new_empty(0, requires_grad=True)
    _, *edges = Anchor.apply((), link, *one_by_one(weights))
    with in_place(list(weights.values()), edges):
        return run()


def anchored(call: TiledCall, inputs: Sequence[Tensor], through: Through) -> tuple[Tensor, Edges]:
    """Return a link to the anchor, and its other outputs: the inputs and weights."""
    link = torch.empty(0, device=call.device, requires_grad=True)
    weights = one_by_one([through.get(weight, weight) for weight in call.weights])
    link, *edges = Anchor.apply((*inputs, *call.weights), link, *inputs, *weights)
    return link, edges


def one_by_one(weights: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return weights whose gradients arrive one by one, the last one first: see NOTE [One order on all ranks]."""
    return [weight.view_as(weight) for weight in weights] if several_ranks() else weights


def several_ranks() -> bool:
    """Whether other ranks may run this call in another way."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Anchor(torch.autograd.Function):
    """Passes tensors on, and is the one node that saves them: see NOTE [Anchor]."""

    @staticmethod
    def forward(ctx: Any, saved: Sequence[Tensor], link: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return (link.view_as(link), *[t.view_as(t) for t in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


@dataclass(frozen=True)
class Trace:
    """What the forward pass of a call leaves for its backward pass."""

    assembly: Assembly
    """How outputs are cut into those of tiles."""
    random: RandomState
    """The generators' state before the forward pass."""
    last: nn.Linear | None
    """The last projection, if the recompute leaves it out."""
    prints: list[Tensor]
    """A fingerprint for each tile: see NOTE [Fingerprint]."""
    frozen: list[Tensor]
    """That of the last projection's weight where no anchor saves it."""
    eps: float
    """The unit in the last place of what they were made of."""


class TiledFunction(torch.autograd.Function):
    """Runs a call; its inputs are the anchor's outputs: see NOTE [Weights are inputs].

    A call that may run later returns ``later``, and adds its trace to the box when it runs.
    """

    @staticmethod
    def forward(
        ctx: Any, call: TiledCall, inputs: Sequence[Tensor], box: list[Any], later: Any, link: Tensor, *_: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.anchor, ctx.box = call, link.grad_fn, box
        if later:
            return later[0]
        trace = forward(call, inputs)
        outputs, tree = trace.assembly.take()
        box += [trace, tree]
        return outputs

    @staticmethod
    @without_compiler
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        call, trace = ctx.call, ctx.box[0]
        saved, found = saved_by(ctx.anchor, call, given), None
        recompute = Recompute(call, trace, saved, leaves_out=trace.last is not None)
        with suppress(NotLeftOut):
            found = recompute.run(given)
        if found is None:  # from now on tiles are recomputed in full
            call.tiled.plans[call.kind] = Plan(None)
            recompute = Recompute(call, trace, saved, leaves_out=False)
            found = recompute.run(given)
        recompute.compare()
        return None, None, None, None, None, *found


def saved_by(anchor: Any, call: TiledCall, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Return the call's inputs and weights in its backward pass.

    Raises:
        RuntimeError: If one was changed in place since, or the backward pass shall have a graph or run batched.
    """
    batched = False
    for gradient in given:  # no public name tells those of is_grads_batched=True
        if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
            batched = True
    if torch.is_grad_enabled() or is_transformed() or batched:
        raise RuntimeError(
            f"{call.name}: a backward pass through tiles cannot be differentiated, transformed or batched"
            " (create_graph, is_grads_batched): call lt_tiled.untile() on the module, or set tiling=False."
        )
    try:
        saved: Sequence[Tensor] = anchor.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"{call.name}: an argument or a weight of the tiled module was changed in place between its"
            " forward and its backward pass, which computes with it again. Make the change out of place, or"
            " lt_tiled.untile() the module."
        ) from error
    return saved


# The forward pass


@hidden_from_checkpoints()
def forward(call: TiledCall, inputs: Sequence[Tensor]) -> Trace:
    """Run all tiles without a graph."""
    random, plan = RandomState.now(call.device), call.plan()
    assembly = Assembly(call.tokens, call.bounds, call.name)
    prints: list[Tensor] = []
    eps = 0.0
    compares = call.differentiable and is_real(inputs[0])
    # Graphs that the module makes for itself are hidden from an activation checkpoint around it.
    with torch.no_grad(), hidden_from_offloaders(), ExitStack() as stack:
        notes = NotesInput(plan.last if plan else None)
        stack.enter_context(notes.in_place())
        for index, tile in each_tile(enumerate(call.tiles([t.detach() for t in inputs]))):
            if plan is None:  # the first tile of the first call of its kind finds the last projection
                output, last, sampled = find_last(partial(call.run, tile))
                plan = call.tiled.plans[call.kind] = Plan(last)
                notes = NotesInput(last)
                stack.enter_context(notes.in_place())
            else:
                output = call.run(tile)
                sampled = notes.input_of(output)
            chosen = to_compare(output, sampled) if compares else None
            if chosen is not None:
                prints.append(fingerprint(chosen, ROWS // len(call.bounds) + 1))
                eps = eps or max(EPS[chosen.dtype], EPS.get(call.precision.dtype or chosen.dtype, 0.0))
            assembly.add(index, output)
            del output, sampled, chosen
    last = plan.last if plan else None
    return Trace(assembly, random, last, prints, prints_of_frozen(last) if compares else [], eps)


def to_compare(output: Any, of_last: Tensor | None) -> Tensor | None:
    """Return a tensor that the recompute computes as well: the input of the last projection, or else an output."""
    for leaf in leaves_of(output) if of_last is None else [of_last]:
        if isinstance(leaf, Tensor) and leaf.dtype in EPS and leaf.numel():
            return leaf
    return None


def prints_of_frozen(last: nn.Linear | None) -> list[Tensor]:
    """Return a fingerprint of a frozen weight: the backward pass reads it, and no recomputed tile shows a change."""
    if last is None or last.weight.requires_grad or not is_real(last.weight):
        return []
    weight = to_compare(last.weight, None)  # none that ZeRO-3 has released
    return [] if weight is None else [fingerprint(weight)]


def leaves_of(output: Any) -> list[Any]:
    """Return the leaves of a tile's output."""
    return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has values: fake ones have none."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def hidden_from_offloaders() -> AbstractContextManager[Any]:
    """Hide the saved tensors of tiles from hooks around; without hooks, hiding costs time for nothing."""
    return PlainSavedTensors() if saves_elsewhere() else nullcontext()


# The backward pass


class Recompute:
    """The recompute of a call's tiles, and their gradients. What is the same for all tiles is made once."""

    def __init__(self, call: TiledCall, trace: Trace, saved: Sequence[Tensor], leaves_out: bool) -> None:
        self.call, self.trace = call, trace
        count, accumulate = len(call.wants_grad), call.tiled.tiling.accumulate
        self.inputs, self.weights = saved[:count], saved[count:]
        self.sums = [GradientSum(weight, accumulate) for weight in self.weights]
        self.leaves = [total.leaf for total in self.sums]
        self.casts, self.uncast = call.precision.dtype is not None, call.precision.disabled()
        self.wholes: list[GradientSum | None] = []
        """Gradient sums of the inputs that each tile sees whole."""
        self.results: list[Tensor | None] = []
        """Gradients of the inputs of which each tile sees a part."""
        for tensor, wants, per_token in zip(self.inputs, call.wants_grad, call.per_token, strict=True):
            self.wholes.append(GradientSum(tensor, accumulate) if wants and not per_token else None)
            self.results.append(tensor.new_zeros(tensor.shape) if wants and per_token else None)
        self.last = NotesInput(trace.last)
        if leaves_out and trace.last is not None:
            self.last = self._leaves_out(trace.last)
        self.prints: list[Tensor] = []
        """A fingerprint for each tile."""
        self.frozen = prints_of_frozen(trace.last) if trace.frozen else []

    def _leaves_out(self, linear: nn.Linear) -> LeavesOut:
        # By their places: FSDP makes its views of flat weights anew for each pass.
        sums: dict[str, GradientSum] = {}
        for places, total in zip(self.call.weights.values(), self.sums, strict=True):
            sums.update((name, total) for part, name in places if part is linear)
        weight, bias = sums.get("weight"), sums.get("bias")
        return LeavesOut(linear, weight, bias, self.call.precision.dtype)

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all tiles.

        Args:
            given: A gradient for each output, in the untiled shape; ``None`` for outputs without one.

        Returns:
            A gradient for each input and each weight.
        """
        call = self.call
        # 1. As in the forward pass: random numbers, autocast and default dtype.
        with random_state_kept(call.device, self.trace.random), call.precision.context():
            # 2. Each tile runs again with a graph, and adds its gradients to the sums.
            swapped = in_place(list(call.weights.values()), self.leaves)
            mine = one_thread(call.function.parts, call.name)
            with torch.enable_grad(), hidden_from_offloaders(), mine, swapped, self.last.in_place():
                self._run_tiles(given)
        # 3. One gradient for each input and weight.
        found: list[Tensor | None] = []
        for result, whole in zip(self.results, self.wholes, strict=True):
            found.append(result if whole is None else whole.take(zeros=True))
        for weight, total in zip(call.weights, self.sums, strict=True):
            found.append(total.take(call.tiled.needs.zeros_for_unused or wants_zeros(weight)))
        return found

    def compare(self) -> None:
        """Compare what the tiles computed with the forward pass, at the end of the backward pass."""
        pairs = ((self.trace.prints, self.prints), (self.trace.frozen, self.frozen))
        for before, now in pairs:
            if before and len(before) == len(now):
                sample = Sample(
                    self.call.name, "lt_tiled.untile() it", self.trace.eps, torch.cat(before), torch.cat(now)
                )
                VERDICT.add(sample)

    def _run_tiles(self, given: Sequence[Tensor | None]) -> None:
        call = self.call
        into: list[Sequence[Tensor | None]] = []
        for result in self.results:
            nowhere: Sequence[Tensor | None] = [None] * len(call.bounds)
            into.append(nowhere if result is None else call.tokens.tiles(result, call.bounds))
        gradients = self.trace.assembly.gradients(given)
        rows = zip(call.tiles(self.inputs), gradients, zip(*into, strict=True), strict=True)
        for index, (tile, own, results) in each_tile(enumerate(rows)):
            # The tile's graph begins at leaves of its own, whose gradients autograd adds to those of the whole.
            leaves: list[Tensor] = []
            for tensor, wants, whole, result in zip(tile, call.wants_grad, self.wholes, results, strict=True):
                leaf = tensor.detach().requires_grad_(wants) if whole is None else whole.leaf
                if result is not None:
                    leaf.grad = result
                leaves.append(leaf)
            # On views, because autocast would cache the cast of a leaf, and sum gradients in 16 bits.
            output = call.run([leaf.view_as(leaf) for leaf in leaves] if self.casts else leaves)
            self._note(output)
            self._differentiate(leaves_of(output), own, leaves, first=index == 0)

    def _note(self, output: Any) -> None:
        """Note what a tile computed, as the forward pass did."""
        chosen = to_compare(output, self.last.input_of(output))
        if chosen is not None and self.trace.prints:
            self.prints.append(fingerprint(chosen, ROWS // len(self.call.bounds) + 1))

    def _differentiate(
        self, outputs: Sequence[Any], own: Sequence[Tensor | None], leaves: Sequence[Tensor], first: bool
    ) -> None:
        """Add the gradients of a tile to those of its leaves."""
        roots: list[Root] = []
        if isinstance(self.last, LeavesOut):
            roots = self.last.roots(own[0])
        else:
            for output, gradient in zip(outputs, own, strict=True):
                if gradient is not None and output.requires_grad:
                    roots.append((output, gradient))
        if not roots:
            return
        if first:
            self._check_leaves(roots, leaves)
        ends, gradients = zip(*roots, strict=True)
        with self.uncast:  # as the untiled backward pass
            # What torch.autograd.backward calls. That checks shapes first, which are right here.
            _engine_run_backward(ends, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _check_leaves(self, roots: Sequence[Root], leaves: Sequence[Tensor]) -> None:
        """Refuse a graph that begins at other tensors, whose engine would see the gradient of each tile."""
        known = {id(leaf) for leaf in (*leaves, *self.leaves)}
        for part in self.call.function.parts:
            known.update(map(id, part._parameters.values()))
            known.update(map(id, part._buffers.values()))
        ends = [end.grad_fn if isinstance(end, Tensor) else end.node for end, _ in roots]
        check_leaves([end for end in ends if end is not None], known, self.call.name)
