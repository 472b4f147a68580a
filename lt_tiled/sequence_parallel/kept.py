"""What a block with activation checkpointing keeps for its recompute: what attention exchanged, or attention itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lt_tiled.policies import Keep


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
        token, self._next = _kept.set(self), 0
        try:
            yield
            self._recorded = True
        finally:
            _kept.reset(token)

    def value(self, compute: Callable[[], Any], store: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
        """Return what ``compute`` returns, or returned in the forward pass.

        Args:
            compute: Called in the forward pass alone.
            store: Turns what it returned into what is kept.
            load: Turns that back.
        """
        if not self._recorded:
            found = compute()
            self._values.append(store(found))
            return found
        index, self._next = self._next, self._next + 1
        value = self._values[index]
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # no public name
            self._values[index] = None  # no second backward pass will need it
        return load(value)


_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)


def kept(what: Keep) -> Kept | None:
    """Return where this thread's block keeps it, if it does."""
    found = _kept.get()
    return found if found is not None and found.what == what else None


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Keep nothing of what is computed inside."""
    token = _kept.set(None)
    try:
        yield
    finally:
        _kept.reset(token)


def attended(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return attention of queries, keys and values, or what it was in the forward pass of the block, with its graph.

    Where the block keeps attention, its saved tensors stay from the forward pass, and it runs once.
    """
    where = kept("attention")
    if where is None or not any(t.requires_grad for t in inputs):  # as in frozen blocks
        return compute(*inputs)

    def run() -> tuple[_Graph, Tensor]:
        with torch.enable_grad(), saved_tensors_hooks(where.pack, where.unpack):
            link = torch.empty(0, device=inputs[0].device, requires_grad=True)
            begun = [_Begin.apply(link, t.detach()) if t.requires_grad else t for t in inputs]
            output = compute(*begun)
        starts = [get_gradient_edge(t) if t.requires_grad else None for t in begun]
        return _Graph(starts, get_gradient_edge(output)), output.detach()

    def store(found: tuple[_Graph, Tensor]) -> Any:
        return found[0], where.pack(found[1])

    def load(stored: tuple[_Graph, Any]) -> tuple[_Graph, Tensor]:
        return stored[0], where.unpack(stored[1])

    graph, output = where.value(run, store, load)
    return _Attended.apply(graph, output, *inputs)  # type: ignore[no-any-return]


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
