"""The two autograd Functions of a tiled call.

:class:`Anchor` saves the call's input before any arithmetic runs. :class:`TiledFunction` computes tile by tile without
a graph and, in the backward, recomputes each tile with one. Inside a checkpointed block torch's early stop fires at the
anchor, because nothing is saved behind it, so the tiled forward does not run again in the recompute. The weights are
inputs of the Function and their gradients are returned: autograd accumulates them once, and every engine's reduction
hook fires once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from lt_tiled.tiling.self_check import check_first
from lt_tiled.tiling.tiled_call import TiledCall
from lt_tiled.tiling.weights import trainable_weights


class Anchor(torch.autograd.Function):
    """Passes a call's tensors through and is the one node that saves them."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, link: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        call.anchor = ctx
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.wants_grad = call.wants_grad
        passed = [t for t, wants in zip(tensors, call.wants_grad, strict=True) if wants]
        return tuple(t.view_as(t) for t in (passed if link is None else [link]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not any(ctx.wants_grad):
            return (None, None, *(None for _ in ctx.wants_grad))
        given = iter(gradients)
        return (None, None, *(next(given) if wants else None for wants in ctx.wants_grad))


class TiledFunction(torch.autograd.Function):
    """``edges`` are what gradients are returned for: the anchor's outputs, then the trainable weights."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, *edges: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(call.forward(learn=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: TiledCall = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{call.mark.name}: a tiled module has no second derivative, and this backward was called with create_graph=True."
                " Call it without, or lt_tiled.untile() the module."
            )
        results = call.backward(call.anchor.saved_tensors, gradients)
        link = [] if any(call.wants_grad) else [None]
        return (None, *link, *results)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_tiled(call: TiledCall) -> Any:
    """Run a call tile by tile."""
    call.mark.note(call.shape.tokens, call.bounds, call.mark.kind, str(call.mark.tiling))
    if any(is_lazy(p) for module in call.work.modules for p in module.parameters()):
        call.fill_lazy_weights()
    if torch.is_grad_enabled():
        call.weights = trainable_weights(call.work)
    if call.differentiable:
        # Where no argument wants a gradient, an empty leaf ties the anchor into the graph.
        link = None if any(call.wants_grad) else torch.empty(0, device=call.device, requires_grad=True)
        edges = Anchor.apply(call, link, *call.inputs)
        leaves = TiledFunction.apply(call, *edges, *(weight.tensor for weight in call.weights))
    else:
        leaves = call.forward(learn=False)
    assert call.layout is not None
    return pytree.tree_unflatten(leaves, call.layout.tree)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_and_run(call: TiledCall) -> Any:
    """Run a call tile by tile, after the self-check if it is the first one."""
    check_first(call)
    return run_tiled(call)
