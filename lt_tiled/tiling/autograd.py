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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import without_compiler
from lt_tiled.tiling.backward import backward
from lt_tiled.tiling.call import TiledCall, Trace
from lt_tiled.tiling.deferred import DeferredCall
from lt_tiled.tiling.recompute import is_transformed


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
        if torch.is_grad_enabled() or is_transformed():
            raise RuntimeError(
                f"{call.patch.name}: a backward pass through tiles cannot be differentiated or transformed"
                " (create_graph=True): call lt_tiled.untile() on the module, or set tiling=False."
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
