"""The untiled function in a backward pass that is itself differentiated, transformed or batched.

NOTE [Second derivatives]
A backward pass whose gradients are differentiated (``create_graph=True``) returns them with a graph. That needs all
that the untiled forward pass saves, so nothing is gained by tiles. A tiled call then runs once more on all tokens, or
in its tiles if it drew random numbers, which come in their order. It runs on views of the arguments that the anchor
saved, and of the weights. The graph goes on from these views into the arguments and the weights themselves. Gradients
are taken at the views, because an argument may have been computed with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.tiling.deferred import Value
from lt_tiled.tiling.layout import gradients_of_tiles
from lt_tiled.tiling.observe import restored
from lt_tiled.tiling.recompute import random_state_kept
from lt_tiled.tiling.tiled_call import TiledCall, Trace, rows_of
from lt_tiled.tiling.weights import check_leaves, paired, substituted


def backward_with_graph(
    call: TiledCall, trace: Trace, inputs: Sequence[Any], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return what :meth:`TiledCall.backward` does, with a graph: see NOTE [Second derivatives]."""
    arguments, weights = viewed(inputs), viewed([w.tensor for w in call.weights])
    outputs = _run_with_graph(call, trace, arguments, weights)
    bounds = call.bounds if len(outputs) > 1 else [(0, call.shape.tokens)]
    given = rows_of(gradients_of_tiles(gradients, trace.layout, call.shape, bounds))
    roots = []
    for output, own in zip(outputs, given, strict=False):
        roots += [pair for pair in zip(pytree.tree_leaves(output), own, strict=True) if pair[1] is not None]
    found = differentiate(call.patch.name, roots, [*arguments, *weights])
    of_weights = found[len(arguments) :]
    if call.patch.needs.zeros_for_unused:
        pairs = zip(of_weights, weights, strict=True)
        of_weights = [torch.zeros_like(weight) if gradient is None else gradient for gradient, weight in pairs]
    return [*(gradient for gradient, wants in zip(found, call.wants_grad, strict=False) if wants), *of_weights]


def output_behind(node: Any, numel: int) -> Tensor | None:
    """Return the output of a tiled call, computed again with its graph, or ``None`` if no such call made it.

    Args:
        node: The node of the output in another shape.
        numel: The number of its elements.
    """
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    call, traces = getattr(node, "call", None), getattr(node, "traces", None)
    if not isinstance(call, TiledCall) or not traces:
        return None
    weights, inputs = [w.tensor for w in call.weights], node.anchor.saved_tensors[-len(call.wants_grad) :]
    outputs = _run_with_graph(call, traces[0], inputs, weights)
    is_whole = len(outputs) == 1 and isinstance(outputs[0], Tensor) and outputs[0].numel() == numel
    return outputs[0] if is_whole else None


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "SliceBackward0", "AliasBackward0", f"{Value.__name__}Backward")


def _run_with_graph(call: TiledCall, trace: Trace, inputs: Sequence[Any], weights: Sequence[Tensor]) -> list[Any]:
    """Return the output of the untiled call, or those of its tiles if it drew random numbers, as it was run."""
    drew = trace.random is not None
    with (
        restored(trace.modules, "its backward pass"),
        call.autocast.context(),
        random_state_kept(call.device, trace.random),
        torch.enable_grad(),
    ):
        if trace.samples[1] and not call.compiles and call.due():
            call.compare(trace, inputs, paired(call.weights, weights))
        with substituted(call.weights, weights):
            bounds = call.bounds if drew else [(0, call.shape.tokens)]
            return [call.run_views(tile) for tile in call.tiles(inputs, bounds)]


def viewed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of tensors, at which gradients are taken that can be differentiated."""
    with torch.enable_grad():
        return [tensor.view_as(tensor) for tensor in tensors]


def differentiate(name: str, roots: Sequence[tuple[Any, Any]], starts: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients at some views of tensors, with a graph if gradients are on.

    Args:
        name: The name in messages.
        roots: Where the graph ends, with the gradients there.
        starts: The views at which it begins; those without a graph get no gradient.

    Raises:
        NotPositionWiseError: If the graph reaches a leaf past these views.
    """
    inform(
        "a backward pass that is differentiated (create_graph=True) or batched keeps the graphs of tiled modules and"
        " losses, in the memory of untiled ones",
        once="create_graph",
    )
    roots = [(end, gradient) for end, gradient in roots if end.requires_grad]
    targets = [start for start in starts if start.requires_grad]
    check_leaves([end.grad_fn for end, _ in roots], (), name, [target.grad_fn for target in targets])
    if not (roots and targets):
        return [None for _ in starts]
    ends, gradients = zip(*roots)  # noqa: B905
    create_graph = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(ends, targets, gradients, create_graph=create_graph, allow_unused=True))
    return [next(found) if start.requires_grad else None for start in starts]
