"""What a block with activation checkpointing keeps for its recompute: what attention exchanged, or attention itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from lt_tiled.policies import Keep

T = TypeVar("T")


def _apart(tensor: Tensor) -> Tensor:
    """Return a tensor to keep: an output that its own node held through a hook would keep the node alive."""
    return tensor if tensor.is_leaf else tensor.detach()


class Kept:
    """What one call of a block keeps: recorded in its forward pass, replayed in the same order in its recompute.

    Args:
        what: What is kept.
        pack: Stores a tensor until the recompute, for example in CPU memory.
        unpack: Returns it.
    """

    def __init__(
        self, what: Keep, pack: Callable[[Tensor], Any] = _apart, unpack: Callable[[Any], Tensor] = lambda t: t
    ) -> None:
        self.what, self.pack, self.unpack = what, pack, unpack
        self._values: list[Any] = []
        self._next = 0
        self._recorded = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Record what the first call computes, and replay it in later ones."""
        self._next = 0
        with keeping(self):
            yield
        self._recorded = True

    def value(self, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns, or returned in the forward pass, where alone it is called."""
        if not self._recorded:
            found = compute()
            leaves, form = pytree.tree_flatten(found)
            packed = [(True, self.pack(leaf)) if isinstance(leaf, Tensor) else (False, leaf) for leaf in leaves]
            self._values.append((packed, form))
            return found
        index, self._next = self._next, self._next + 1
        packed, form = self._values[index]
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # no public name
            self._values[index] = None  # no second backward pass will need it
        replayed: T = pytree.tree_unflatten([self.unpack(leaf) if moved else leaf for moved, leaf in packed], form)
        return replayed


_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)


@contextmanager
def keeping(kept: Kept | None) -> Iterator[None]:
    """Keep there what is computed inside; nothing with ``None``."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def kept_or(what: Keep | None, compute: Callable[[], T]) -> T:
    """Return what ``compute`` returns, or what this thread's block kept of it in its forward pass.

    A block keeps what is of its own kind, or of any kind with ``None``.
    """
    kept = _kept.get()
    return compute() if kept is None or what not in (kept.what, None) else kept.value(compute)


def attended(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return attention of queries, keys and values, or what it was in the forward pass of the block, with its graph.

    Where the block keeps attention, its saved tensors stay from the forward pass, and it runs once.
    """
    kept = _kept.get()
    if kept is None or kept.what != "attention" or not any(t.requires_grad for t in inputs):  # as in frozen blocks
        return compute(*inputs)

    def run() -> tuple[_Graph, Tensor]:
        with torch.enable_grad(), saved_tensors_hooks(kept.pack, kept.unpack):
            link = torch.empty(0, device=inputs[0].device, requires_grad=True)
            begun = [_Begin.apply(link, t.detach()) if t.requires_grad else t for t in inputs]
            output = compute(*begun)
        starts = [get_gradient_edge(t) if t.requires_grad else None for t in begun]
        return _Graph(starts, get_gradient_edge(output)), output.detach()

    return _Attended.apply(*kept.value(run), *inputs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Graph:
    """The graph of one run of attention, which holds neither its inputs nor its output."""

    starts: list[GradientEdge | None]
    """Where it begins, for each input that wants a gradient."""
    end: GradientEdge


class _Begin(torch.autograd.Function):
    """Begins a graph at a tensor that the graph does not hold, as that of a leaf would."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


class _Attended(torch.autograd.Function):
    """The output of a run, whose backward pass goes through the run's graph."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, output: Tensor, *_: Tensor) -> Tensor:
        ctx.graph = graph
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        starts, end = ctx.graph.starts, ctx.graph.end
        wanted = [start for start in starts if start is not None]
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        found = iter(torch.autograd.grad([end], wanted, [gradient], retain_graph=again, allow_unused=True))
        return (None, None, *(None if start is None else next(found) for start in starts))
