"""Where the untiled function takes the place of tiles: under transforms, and in a backward pass that has a graph.

NOTE [Second derivatives]
A backward pass whose own gradients are differentiated (``create_graph=True``) returns gradients with a graph. Their
graph needs all that the untiled forward pass saves, so nothing is gained by tiles. A tiled call then runs its work once
more on all tokens, or in its tiles if it drew random numbers, which come in their order, on views of the arguments that
the anchor saved and of the weights. The graph goes on from these views into the arguments and the weights themselves,
and gradients are taken at the views, because a weight may also be what an argument was computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.tiling.compiled import CannotCompile
from lt_tiled.tiling.observe import restored
from lt_tiled.tiling.recompute import random_state_kept
from lt_tiled.tiling.tiled_call import TiledCall, Trace, gradients_of_tiles
from lt_tiled.tiling.weights import check_leaves, paired, substituted


def is_transformed(parts: Iterable[nn.Module] = ()) -> bool:
    """Whether this code is run by what autograd Functions and torch's checkpoint cannot follow, which is logged once.

    Args:
        parts: The modules whose code it is.
    """
    if torch._C._are_functorch_transforms_active():
        transform = "torch.func"
    elif forward_ad._current_level >= 0:
        transform = "forward-mode differentiation"
    elif parametrize._cache_enabled and any(parametrize.is_parametrized(part) for part in parts):
        transform = "torch.nn.utils.parametrize.cached()"  # whose cache the first tile would fill, without a graph
    else:
        return False
    inform(f"under {transform} nothing runs in tiles or with lt_tiled's activation checkpointing", once=transform)
    return True


def wants_graph() -> bool:
    """Whether the gradients of the backward pass that runs this are to be differentiated, or are transformed."""
    return torch.is_grad_enabled() or is_transformed()


def backward_with_graph(
    call: TiledCall, trace: Trace, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return what :meth:`TiledCall.backward` does, with a graph: see NOTE [Second derivatives]."""
    drew, name = trace.random is not None, call.patch.name
    if drew and call.compiled is not None:
        call.compile_no_more(CannotCompile("it has create_graph=True"), random=True)
    arguments = [t.view_as(t) for t in inputs]
    weights = [w.tensor.view_as(w.tensor) for w in call.weights]
    roots: list[tuple[Tensor, Tensor]] = []
    with _as_in_forward(call, trace):
        call.compare(trace, inputs, paired(call.weights, weights))
        bounds = call.bounds if drew else [(0, call.shape.tokens)]
        given = gradients_of_tiles(gradients, trace.layout, call.shape, bounds)
        for tile, own in zip(call.tiles(arguments, bounds), given, strict=False):
            with substituted(call.weights, weights):
                outputs = pytree.tree_leaves(call.run_views(tile))
            for output, gradient in zip(outputs, own, strict=True):
                if gradient is not None and output.requires_grad:
                    roots.append((output, gradient))
        with call.autocast.disabled():
            found = differentiate_with_graph(name, roots, [*arguments, *weights])
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
    with _as_in_forward(call, traces[0]), substituted(call.weights, [w.tensor for w in call.weights]):
        output = call.arguments.call(call.work.function, inputs)
    return output if isinstance(output, Tensor) and output.numel() == numel else None


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "SliceBackward0", "AliasBackward0", "_ValueBackward")


@contextmanager
def _as_in_forward(call: TiledCall, trace: Trace) -> Iterator[None]:
    """Compute with what the forward pass of a call read."""
    with (
        restored(trace.modules, "its backward pass"),
        call.autocast.context(),
        random_state_kept(call.device, trace.random),
    ):
        yield


def differentiate_with_graph(
    name: str, roots: Sequence[tuple[Tensor, Tensor]], starts: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients that can be differentiated.

    Args:
        name: The name in messages.
        roots: Where the graph ends, with the gradients there.
        starts: Views at which it begins; those without a graph get no gradient.

    Raises:
        NotPositionWiseError: If the graph reaches a leaf past these views.
    """
    inform(
        "a backward pass with create_graph=True keeps the graphs of tiled modules and losses, in the memory of untiled"
        " ones",
        once="create_graph",
    )
    targets = [start for start in starts if start.requires_grad]
    check_leaves([end.grad_fn for end, _ in roots], (), name, [target.grad_fn for target in targets])
    if not (roots and targets):
        return [None for _ in starts]
    ends, gradients = zip(*roots)  # noqa: B905
    found = iter(torch.autograd.grad(ends, targets, gradients, create_graph=True, allow_unused=True))
    return [next(found) if start.requires_grad else None for start in starts]
