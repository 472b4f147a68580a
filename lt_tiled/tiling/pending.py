"""Tensors that are computed on first use.

NOTE [Pending]
A norm whose output may go into the tiles of what follows it, an MLP or the projections of attention, returns a
:class:`Pending` tensor, which has not run. If its first use is that module, both run in the same tiles, and the tensor
between them never exists in full. Any other use runs it at once and goes on with its value, so the block's own code
decides, and a wrong guess costs nothing else. The tensor has its place in the graph from the beginning: a custom
autograd Function, which goes past Python's operators, gets the right value and gradient as well. Nothing that is
pending leaves its block, whose engine may free the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import Order, Patch
from lt_tiled.recompute.mode import Precision, hooks_of_saved_tensors, version_of
from lt_tiled.tiling.anchor import anchored
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.run import TiledFunction, Trace, forward


class Deferred(Tensor):
    """A tensor that is computed on first use. Subclasses say how, and what can be joined to it instead."""

    computed: Tensor | None = None
    """The plain tensor with its graph, once it was used. Its shape may have been changed in place since."""

    def compute(self) -> Tensor:
        """Return the plain tensor with its graph."""
        raise AssertionError

    def value(self) -> Tensor:
        """Return the plain tensor with its graph, which is computed once."""
        if self.computed is None:
            self.computed = self.compute()
        return self.computed

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that needs no value, else ``NotImplemented``."""
        return NotImplemented

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Deferred))
        if func in _METADATA and first.computed is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        joined = first.joined(func, args, kwargs)
        if joined is not NotImplemented:
            return joined
        args, kwargs = values((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(Deferred, lambda t: t.value().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


_METADATA = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")}
_METADATA |= {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.stride}
_METADATA |= {Tensor.is_floating_point, Tensor.__len__}


def values(tree: Any) -> Any:
    """Return the tree with the values of all deferred tensors in it."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Deferred):
            return pytree.tree_map_only(Deferred, lambda t: t.value(), tree)
    return tree


_inside: ContextVar[list[weakref.ref[Pending]] | None] = ContextVar("pending_inside", default=None)


class Boundary(Patch):
    """On a block: nothing that is pending leaves it, because its engine may free the weights."""

    order = Order.PARENT

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is pending in the outputs of a block, and what something still refers to."""
        inside: list[weakref.ref[Pending]] = []
        token = _inside.set(inside)
        try:
            output = values(self.inner(module, *args, **kwargs))
        finally:
            _inside.reset(token)
        for reference in inside:
            pending = reference()
            if pending is not None:
                pending.value()
        return output


class Pending(Deferred):
    """The output of a call that has not run: see NOTE [Pending]."""

    call: TiledCall
    inputs: Sequence[Tensor]
    box: list[Trace]
    """What the call leaves for its backward pass, once it ran."""
    versions: list[int]
    """Of the inputs."""
    group: Any
    """Who may run it in its tiles."""
    hooks: Any
    """Those around that see saved tensors: a checkpoint inside of the block would not join again what is outside."""

    @classmethod
    def of(cls, call: TiledCall, inputs: Sequence[Tensor], group: Any) -> Any:
        """Return the output of a call that runs on first use."""
        assert call.plan.output is not None
        tail, dtype = call.plan.output
        shape = (*call.tokens.lead, *tail)
        pending: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=call.device)
        pending.call = call
        pending.inputs = inputs
        pending.versions = list(map(version_of, inputs))
        pending.group = group
        pending.box = []
        pending.hooks = hooks_of_saved_tensors()
        inside = _inside.get()
        if inside is not None:
            inside.append(weakref.ref(pending))
        # The anchor saves inputs and weights as they are now, so autograd refuses those that change before it runs.
        link, edges = anchored(call, inputs)
        TiledFunction.apply(call, pending.box, (pending,), link, *edges)
        return pending

    def compute(self) -> Tensor:
        """Run the call, and return its output with its graph."""
        with torch.inference_mode(False), torch.enable_grad():
            value: Tensor = _Value.apply(self)
        return value

    def may_join(self, group: Any) -> bool:
        """Whether what follows may run in the same tiles: nothing used it, and all is as it was before."""
        if self.group is not group or self.computed is not None or not torch.is_grad_enabled():
            return False
        if list(map(version_of, self.inputs)) != self.versions:
            return False
        return Precision.now(self.call.device) == self.call.precision and hooks_of_saved_tensors() == self.hooks


class _Value(torch.autograd.Function):
    """The plain tensor of a pending one."""

    @staticmethod
    def forward(ctx: Any, pending: Pending) -> Tensor:
        with pending.call.precision.context():
            (output,), trace = forward(pending.call, pending.inputs)
        pending.box.append(trace)
        pending.inputs = []
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
