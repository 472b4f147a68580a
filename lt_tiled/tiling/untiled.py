"""The untiled function in a backward pass that is itself differentiated, transformed or batched.

NOTE [Second derivatives]
A backward pass whose gradients are differentiated (``create_graph=True``) returns them with a graph. That needs all
that the untiled forward pass saves, so nothing is gained by tiles. A tiled call then runs its work once
more on all tokens, or in its tiles if it drew random numbers, which come in their order, on views of the arguments that
the anchor saved and of the weights. The graph goes on from these views into the arguments and the weights themselves,
and gradients are taken at the views, because a weight may also be what an argument was computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.tiling.compiled import CannotCompile
from lt_tiled.tiling.deferred import Value
from lt_tiled.tiling.layout import gradients_of_tiles
from lt_tiled.tiling.observe import restored
from lt_tiled.tiling.recompute import random_state_kept
from lt_tiled.tiling.tiled_call import TiledCall, Trace, rows_of
from lt_tiled.tiling.weights import check_leaves, paired, substituted


def backward_with_graph(
    call: TiledCall, trace: Trace, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return what :meth:`TiledCall.backward` does, with a graph: see NOTE [Second derivatives]."""
    drew, name = trace.random is not None, call.patch.name
    if drew and call.compiled is not None:
        call.compile_no_more(CannotCompile("it has create_graph=True"), random=True)
    create_graph = torch.is_grad_enabled()
    arguments, weights = viewed(inputs), viewed([w.tensor for w in call.weights])
    roots: list[tuple[Tensor, Tensor]] = []
    with _as_in_forward(call, trace), torch.enable_grad():
        if trace.samples[1] and call.compiled is None and call.due():
            call.compare(trace, inputs, paired(call.weights, weights))
        bounds = call.bounds if drew else [(0, call.shape.tokens)]
        given = gradients_of_tiles(gradients, trace.layout, call.shape, bounds)
        for tile, own in zip(call.tiles(arguments, bounds), rows_of(given), strict=False):
            with substituted(call.weights, weights):
                outputs = pytree.tree_leaves(call.run_views(tile))
            for output, gradient in zip(outputs, own, strict=True):
                if gradient is not None and output.requires_grad:
                    roots.append((output, gradient))
        with call.autocast.disabled():
            found = differentiate_with_graph(name, roots, [*arguments, *weights], create_graph)
    of_arguments = [gradient for gradient, wants in zip(found, call.wants_grad, strict=False) if wants]
    of_weights = found[len(arguments) :]
    if call.patch.needs.zeros_for_unused:
        pairs = zip(of_weights, weights, strict=True)
        of_weights = [torch.zeros_like(weight) if gradient is None else gradient for gradient, weight in pairs]
    return [*of_arguments, *of_weights]


def output_behind(node: Any, numel: int) -> Tensor | None:
    """Return what a tiled call returned, computed again with its graph.

    Args:
        node: The node of the output in another shape.
        numel: The number of its elements.

    Returns:
        ``None`` if no call that returned one tensor, and drew no random numbers, is behind the node.
    """
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    call, traces = getattr(node, "call", None), getattr(node, "traces", None)
    if not isinstance(call, TiledCall) or not traces or traces[0].random is not None:
        return None
    inputs = node.anchor.saved_tensors[-len(call.wants_grad) :]
    weights = [w.tensor for w in call.weights]
    with _as_in_forward(call, traces[0]), substituted(call.weights, weights), torch.enable_grad():
        output = call.arguments.call(call.work.function, inputs)
    return output if isinstance(output, Tensor) and output.numel() == numel else None


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "SliceBackward0", "AliasBackward0", f"{Value.__name__}Backward")


@contextmanager
def _as_in_forward(call: TiledCall, trace: Trace) -> Iterator[None]:
    """Compute with what the forward pass of a call read."""
    with (
        restored(trace.modules, "its backward pass"),
        call.autocast.context(),
        random_state_kept(call.device, trace.random),
    ):
        yield


def viewed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of tensors, at which gradients are taken that can be differentiated."""
    with torch.enable_grad():
        return [tensor.view_as(tensor) for tensor in tensors]


def differentiate_with_graph(
    name: str, roots: Sequence[tuple[Tensor, Tensor]], starts: Sequence[Tensor], create_graph: bool
) -> list[Tensor | None]:
    """Return gradients at some views of tensors.

    Args:
        name: The name in messages.
        roots: Where the graph ends, with the gradients there.
        starts: The views at which it begins; those without a graph get no gradient.
        create_graph: Whether the gradients are to be differentiated.

    Raises:
        NotPositionWiseError: If the graph reaches a leaf past these views.
    """
    inform(
        "a backward pass that is differentiated (create_graph=True) or batched keeps the graphs of tiled modules and"
        " losses, in the memory of untiled ones",
        once="create_graph",
    )
    targets = [start for start in starts if start.requires_grad]
    check_leaves([end.grad_fn for end, _ in roots], (), name, [target.grad_fn for target in targets])
    if not (roots and targets):
        return [None for _ in starts]
    ends, gradients = zip(*roots)  # noqa: B905
    found = iter(torch.autograd.grad(ends, targets, gradients, create_graph=create_graph, allow_unused=True))
    return [next(found) if start.requires_grad else None for start in starts]
