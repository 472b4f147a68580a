"""Attention that a block with activation checkpointing keeps for its recompute: its saved tensors, or its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.kept import current_kept, unpacked
from lt_tiled.modules.patch import without_compiler
from lt_tiled.offload.tensors import storage_key
from lt_tiled.policies import Keep
from lt_tiled.tiling.recompute import Precision, RandomState, keeps_graph, random_state_kept, version_of


def attended(what: Keep, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the output of attention with its graph: computed, or kept from the forward pass of the block.

    Attention runs once if the block keeps it. With ``"attention"`` all tensors that attention saves are kept. With
    ``"attention_output"`` its inputs are left out, and the recompute computes them again. Attention is not kept if
    something other than its inputs wants a gradient, such as a learned bias, because the graph would end there.
    ``compute`` must not hold the inputs, because the backward pass calls it once more if the recompute's inputs have
    other strides.
    """
    kept = current_kept.get()
    if kept is None or kept.what != what or not any(t.requires_grad for t in inputs):  # as in frozen blocks
        return compute(*inputs)

    def run() -> tuple[_Graph | None, Tensor | None]:
        recomputed = _Recomputed(kept.pack, kept.unpack, inputs if what == "attention_output" else ())
        with torch.enable_grad(), saved_tensors_hooks(recomputed.pack, lambda packed: packed()):
            link = torch.empty(0, device=inputs[0].device, requires_grad=True)
            begun = [_Begin.apply(link, t.detach()) if t.requires_grad else t for t in inputs]
            output = compute(*begun)
        if _reads_others(output):
            return None, None
        starts = [get_gradient_edge(t) if t.requires_grad else None for t in begun]
        return _Graph(starts, get_gradient_edge(output), recomputed), output.detach()

    graph, output = kept.value(run)
    if graph is None:
        inform("attention that reads a learned bias or weight is recomputed", once="not kept")
        return compute(*inputs)
    again = partial(_gradients_again, compute, Precision.now(kept.device), kept.drew)
    # Outside of the arguments, because one that is returned could not be changed in place.
    return _Attended.apply((graph, again, output), *inputs)  # type: ignore[no-any-return]


def _reads_others(output: Tensor) -> bool:
    """Whether the graph of an output has leaves besides those at which a run of attention begins."""
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node.name() == f"{_Begin.__name__}Backward":
            continue
        seen.add(node)
        if not node.next_functions:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def keeps_attention() -> bool:
    """Whether this thread's block keeps attention, or its output."""
    kept = current_kept.get()
    return kept is not None and kept.what != "exchange"


def attended_alone(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return what an attention function returns where ranks share no tokens, and keep it if the block does."""
    kept = current_kept.get()
    if kept is None or kept.what is None or kept.what == "exchange":
        return function(*args, **kwargs)
    leaves, form = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None

    def compute(*inputs: Tensor) -> Tensor:
        own = list(leaves)
        for place, value in zip(places, inputs, strict=True):
            own[place] = value
        own_args, own_kwargs = pytree.tree_unflatten(own, form)
        return function(*own_args, **own_kwargs)

    return attended(kept.what, compute, *inputs)


class _Recomputed:
    """Tells saved tensors that are inputs of attention from others, which are kept.

    Args:
        kept: Where the others go.
        inputs: The inputs that are recomputed.
    """

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], inputs: Sequence[Tensor]
    ) -> None:
        # Not the block's Kept, which holds the graph that saves these: no collector sees a cycle through a graph.
        self._pack, self._unpack = pack, unpack
        self._places = {storage_key(tensor): place for place, tensor in enumerate(inputs)}
        self.layouts = [_layout(tensor) for tensor in inputs]
        self.inputs: Sequence[Tensor] = ()
        """The recomputed ones, while a backward pass needs them."""

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what gives a saved tensor back."""
        place = self._places.get(storage_key(tensor))
        if place is None or tensor.dtype != self.layouts[place][0] or tensor.is_conj() or tensor.is_neg():
            return partial(unpacked, self._unpack, version_of(tensor), self._pack(tensor))
        form = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return lambda: self.inputs[place].as_strided(*form)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return where in its storage a tensor is, and how large that is."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class _Graph:
    """The graph of one run of attention, which holds neither its inputs nor its output."""

    starts: list[GradientEdge | None]
    """Where it begins, for each input that wants a gradient."""
    end: GradientEdge
    recomputed: _Recomputed


class _Begin(torch.autograd.Function):
    """Begins a graph at a tensor that the graph does not hold; the graph of a leaf would hold the leaf."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    @without_compiler
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def _gradients_again(
    compute: Callable[..., Tensor],
    precision: Precision,
    random: RandomState | None,
    inputs: Sequence[Tensor],
    gradient: Tensor,
) -> list[Tensor | None]:
    """Compute attention once more as it was, and return gradients of its inputs."""
    as_before = nullcontext() if random is None else random_state_kept(random.device, random)
    with torch.enable_grad(), precision.context(), as_before:
        output = compute(*inputs)
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad([output], wanted, [gradient], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


class _Attended(torch.autograd.Function):
    """The output of a run, whose backward pass goes through the run's graph."""

    @staticmethod
    def forward(ctx: Any, run: tuple[_Graph, Callable[..., Any], Tensor], *inputs: Tensor) -> Tensor:
        ctx.graph, ctx.again, output = run
        if ctx.graph.recomputed.layouts:
            ctx.save_for_backward(*inputs)  # those of the recompute: the block's checkpoint saves none before
        return output.detach()

    @staticmethod
    @without_compiler
    def backward(ctx: Any, gradient: Tensor) -> Any:
        starts, end, recomputed = ctx.graph.starts, ctx.graph.end, ctx.graph.recomputed
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A backward pass through attention that blocks keep cannot be differentiated (create_graph=True): set"
                " keep=None."
            )
        if [_layout(tensor) for tensor in inputs] != recomputed.layouts:
            return (None, *ctx.again(inputs, gradient))
        wanted = [start for start in starts if start is not None]
        recomputed.inputs = inputs
        found = iter(torch.autograd.grad([end], wanted, [gradient], retain_graph=keeps_graph(), allow_unused=True))
        recomputed.inputs = ()
        return (None, *(None if start is None else next(found) for start in starts))
