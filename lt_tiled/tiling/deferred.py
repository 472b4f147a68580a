"""A tensor that is computed on first use.

NOTE [Deferred]
A module that may be tiled together with its neighbor (a norm before an MLP or before the projections of attention, an
MLP with a norm after it, a head with its loss) returns a :class:`Deferred`, as torch's ``AsyncCollectiveTensor`` waits
on first use. If its first use is the neighbor, both run in the same tiles, and the tensor between them never exists in
full. Any other use computes the module's own value and goes on with that, so the block's own code decides and a wrong
guess saves nothing and costs nothing else.
A :class:`DeferredCall` has its place in the autograd graph from the beginning: code that goes past Python's operators
(a custom autograd Function, hooks of engines) gets the right values and gradients too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree
from torch.utils.module_tracker import ModuleTracker

from lt_tiled.tiling.call import TiledCall, Trace
from lt_tiled.tiling.observe import Observation, restored
from lt_tiled.tiling.recompute import Precision
from lt_tiled.tiling.state import Tiled
from lt_tiled.tiling.weights import Work


class Deferred(Tensor):
    """A tensor that is computed on first use. Subclasses say how, and what can be joined to it instead."""

    @classmethod
    def like(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """Return an instance without memory."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    has_value = False
    """Whether there is a plain tensor, whose shape may have been changed in place since."""

    def value(self, because: str) -> Any:
        """Return the plain tensor with its graph.

        Args:
            because: The name of the function that uses it.
        """
        raise AssertionError

    def data_value(self) -> Tensor:
        """Return the plain tensor without a graph, for code below autograd."""
        raise AssertionError

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that needs no value, else ``NotImplemented``."""
        return NotImplemented

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Deferred))
        if func in _METADATA and not first.has_value:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        joined = first.joined(func, args, kwargs)
        if joined is not NotImplemented:
            return joined
        args, kwargs = values((args, kwargs), getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Deferred, lambda t: t.data_value(), (args, kwargs or {}))
        return func(*args, **kwargs)


def values(tree: Any, because: str = "") -> Any:
    """Return the tree with the values of all deferred tensors in it."""
    if not any(isinstance(leaf, Deferred) for leaf in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map_only(Deferred, lambda t: t.value(because), tree)


@contextmanager
def none_left() -> Iterator[None]:
    """Run the calls that were deferred inside and that something still refers to, while their weights are there."""
    inside: list[weakref.ref[DeferredCall]] = []
    token = _deferred_inside.set(inside)
    try:
        yield
    finally:
        _deferred_inside.reset(token)
    for reference in inside:
        if (deferred := reference()) is not None:
            deferred.computed()


_deferred_inside: ContextVar[list[weakref.ref[DeferredCall]] | None] = ContextVar("deferred_inside", default=None)
_USE = "the first use of its output"


class DeferredCall(Deferred):
    """The output of a tiled call that has not run yet."""

    call: TiledCall
    inputs: list[Tensor]
    versions: list[int]
    """Of the inputs."""
    modules: Observation | None
    traces: list[Trace]
    """The trace of the call once it ran; the call's node shares the list."""
    runs_in_neighbor: bool
    """Whether a neighbor runs this call's work in its own tiles."""
    may_repeat: bool
    """Whether several neighbors may: the work has no matrix product."""
    _data: Tensor | None
    _value: Tensor | None
    _node: Any

    @classmethod
    def of(
        cls, call: TiledCall, inputs: list[Tensor], traces: list[Trace], shape: tuple[int, ...], dtype: torch.dtype
    ) -> DeferredCall:
        """Return the deferred output of a call."""
        deferred: DeferredCall = cls.like(shape, dtype, call.device)
        deferred.call, deferred.inputs, deferred.traces, deferred.runs_in_neighbor = call, inputs, traces, False
        deferred.versions, deferred.modules = [t._version for t in inputs], call.observe()
        deferred.may_repeat = call.patch.found.guessed
        deferred._data = deferred._value = deferred._node = None
        if (inside := _deferred_inside.get()) is not None:
            inside.append(weakref.ref(deferred))
        return deferred

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer what is asked of the gradient from this tensor's own place in the graph."""
        if func not in _OF_THE_GRADIENT or self._changed():
            return NotImplemented
        if func not in _READS and not (func is Tensor.register_hook and _tracks(args[1])):
            if self.runs_in_neighbor:
                raise RuntimeError(
                    f"{self.call.patch.name}: its output went into the tiles of what follows, so there is no gradient"
                    " of it. Ask for it before that runs, or remove the module from Tiling(targets=...)."
                )
            self.computed()  # it has a gradient only if no neighbor takes it
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def value(self, because: str = "") -> Tensor:
        """Run the call, once, and return its output with the graph that it had when it was called."""
        if self._value is None:
            with torch.inference_mode(False), torch.enable_grad():
                self._value, self.has_value = Value.apply(self), True
                self._node = self._value.grad_fn
        elif not torch.is_grad_enabled():
            self._refuse_if_changed()
        return self._value

    def data_value(self) -> Tensor:
        """Run the call, once, and return its output without a graph."""
        self._refuse_if_changed()
        return self.computed().detach()

    def _changed(self) -> bool:
        return self._value is not None and self._value.grad_fn is not self._node

    def _refuse_if_changed(self) -> None:
        if self._changed():
            raise RuntimeError(
                f"{self.call.patch.name}: its output was changed in place and then read without gradients, or by a"
                " custom autograd Function, whose gradient would miss the change. Make the change out of place."
            )

    def computed(self) -> Tensor:
        """Run the call, once."""
        if self._data is None:
            self._data, self.inputs = self._run(), []
        return self._data

    def _run(self) -> Tensor:
        if self.call.patch.needs.same_order:
            self.call.patch.note_alone(self.call.work.key)
        self._check_inputs()
        with torch.inference_mode(False), restored(self.modules, _USE):
            leaves, trace = self.call.forward(self.inputs, learn=True, observed=self.modules)
        self.traces.append(trace)
        output: Tensor = leaves[0]
        return output

    def _check_inputs(self) -> None:
        if [t._version for t in self.inputs] != self.versions:
            raise RuntimeError(
                f"{self.call.patch.name}: its input was changed in place before its output was used. Make the change"
                " out of place, use the output before, or remove the module from Tiling(targets=...)."
            )

    def open_for(self, patch: Tiled) -> bool:
        """Whether a neighbor of the same tiled module can run in the same tiles.

        Raises:
            RuntimeError: If what the call reads changed since, and all ranks must run the same tiles.
        """
        same = self.call.patch is patch and self.call.autocast == Precision.now(self.call.device)
        if (
            not same
            or self._data is not None
            or not torch.is_grad_enabled()
            or (patch.needs.same_order and patch.must_run_alone(self.call.work.key))
            or (self.runs_in_neighbor and not self.may_repeat)
        ):
            return False
        changes = [] if self.modules is None else self.modules.changes(by_value=False)
        change = changes[0] if changes else None
        if change is not None and patch.needs.same_order:
            raise RuntimeError(
                f"{patch.name}: {' '.join(change)} before the first use of its output. The engine needs the same order"
                " of gradients on all ranks, so make the change after that, or remove the module from"
                " Tiling(targets=...)."
            )
        return change is None

    def followed_by(self, work: Work) -> tuple[Work, tuple[Any, ...]]:
        """Return one work that runs this call's and, on its output, the neighbor's; and this call's arguments.

        The work takes those in the place of the neighbor's first argument, which is this tensor.
        """
        self._check_inputs()
        run = partial(_run_both, self.call.work.function, work.function)
        key = (self.call.work.key, self.call.arguments.tree, work.key)
        own = self.call.work
        together = Work(run, (*own.modules, *work.modules), key, own.whole and work.whole)
        return together, self.call.arguments.call_with(self.inputs)[0]


def _run_both(
    first: Callable[..., Any], second: Callable[..., Any], own: tuple[Any, ...], *args: Any, **kwargs: Any
) -> Any:
    return second(first(*own), *args, **kwargs)


class Value(torch.autograd.Function):
    """The plain tensor of a deferred one."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredCall) -> Tensor:
        return deferred.computed()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _getters(*names: str) -> set[Any]:
    return {Tensor.__dict__.get(name, getattr(torch._C.TensorBase, name)).__get__ for name in names}


_METADATA = _getters("shape", "dtype", "device", "ndim", "layout") | {
    *(
        getattr(Tensor, name)
        for name in ("size", "dim", "ndimension", "numel", "stride", "is_floating_point", "__len__")
    )
}
_READS = _getters("requires_grad", "grad_fn", "is_leaf", "grad")
_OF_THE_GRADIENT = _READS | {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward}


def _tracks(hook: Any) -> bool:
    """Whether a hook on a gradient is a module tracker's, which follows modules and reads no gradient."""
    trackers = (getattr(h, "__self__", None) for h in torch_module._global_forward_hooks.values())
    return hook.__module__ == "torch.autograd.graph" and any(isinstance(t, ModuleTracker) for t in trackers)
