"""Modules that a block runs one behind another, tiled as one.

The first of them computes nothing: it returns a :class:`Pending`. The others, and functions that work entry by entry,
add themselves to it. Whatever else touches it gets its value, and only then is the whole chain run, tile by tile. So a
chain needs no knowledge of the block's code, and code that does something unexpected with a value in between gets that
value.

Two things come of it. OPT's and Whisper's ``fc1`` and ``fc2`` are tiled though they stand in the block itself. And a
norm behind the MLP (Gemma, OLMo 2, GLM-4, BERT) is tiled with it: nothing is saved behind the anchor, so a checkpointed
block's recompute stops there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._arguments import Arguments, split_arguments
from lt_tiled._log import inform_once
from lt_tiled.modules.find import unwrapped
from lt_tiled.modules.patch import Mark, get_mark, get_marks, remove_mark, set_mark
from lt_tiled.tiling.autograd import check_and_run
from lt_tiled.tiling.recompute import AutocastState, random_state_kept
from lt_tiled.tiling.state import TileMark
from lt_tiled.tiling.tiled_call import TiledCall
from lt_tiled.tiling.work import Work

BETWEEN = -1
"""In :attr:`Step.slots`: the value that comes from the step before."""


@dataclass(frozen=True)
class Step:
    """One function of the chain; ``slots`` says which of the call's tensors its arguments are."""

    function: Callable[..., Any]
    arguments: Arguments
    slots: tuple[int, ...]
    modules: tuple[nn.Module, ...]
    name: str

    def run(self, tensors: Sequence[Tensor], between: Any) -> Any:
        args, kwargs = self.arguments.call_with([between if slot == BETWEEN else tensors[slot] for slot in self.slots])
        return self.function(*args, **kwargs)


class _NoValue(torch.autograd.Function):
    """The graph of a pending value, which only code that goes past Python's operators can reach: it says so instead of
    losing gradients.
    """

    @staticmethod
    def forward(ctx: Any, name: str, like: Tensor, link: Tensor) -> Tensor:
        ctx.name = name
        return Pending.bare(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"{ctx.name}: {_TAKEN}")


_TAKEN = (
    "a custom autograd Function (torch's reentrant checkpoint is one) takes or returns the value of a chain of modules that is tiled as"
    " one, which it cannot see. Name the modules to tile in Tiling(targets=...), without this one."
)


class Pending(Tensor):
    """What a chain gives, as soon as somebody asks. Immutable: each step that joins makes another one."""

    mark: TileMark
    steps: tuple[Step, ...]
    tensors: tuple[Tensor, ...]
    """The arguments of all steps, each once."""
    then: _Moment
    _value: Any
    _computed: bool

    @staticmethod
    def bare(like: Tensor) -> Pending:
        pending: Pending = Tensor._make_wrapper_subclass(Pending, like.shape, dtype=like.dtype, device=like.device)
        return pending

    @staticmethod
    def of(mark: TileMark, steps: tuple[Step, ...], tensors: tuple[Tensor, ...], then: _Moment) -> Pending:
        with torch._C.DisableTorchFunctionSubclass():
            # The link makes it require a gradient, whether the input does or weights alone.
            pending: Pending = _NoValue.apply(mark.name, tensors[0].detach(), torch.empty(0, requires_grad=True))
        pending.mark, pending.steps, pending.tensors, pending.then = mark, steps, tensors, then
        pending._value, pending._computed = None, False
        return pending

    def joined(
        self,
        function: Callable[..., Any],
        modules: tuple[nn.Module, ...],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Pending:
        """This chain with one more step."""
        args, kwargs = pytree.tree_map_only(
            Pending, lambda other: other if other is self else other.value(), (args, kwargs)
        )
        found, arguments = split_arguments(args, kwargs)
        tensors, slots = list(self.tensors), []
        for t in found:
            if t is not self and not any(t is known for known in tensors):
                tensors.append(t)
            slots.append(BETWEEN if t is self else next(i for i, known in enumerate(tensors) if known is t))
        step = Step(function, arguments, tuple(slots), modules, name)
        return Pending.of(self.mark, (*self.steps, step), tuple(tensors), self.then.with_more(tensors))

    @property
    def open(self) -> bool:
        """Whether a step can still join: not once it was computed, nor under another autocast or gradient mode."""
        return not self._computed and self.then.is_now(self.tensors)

    def value(self) -> Any:
        """Run the chain, once."""
        if not self._computed:
            self.then.check(self.tensors, self.mark.name)
            with torch._C.DisableTorchFunctionSubclass():
                adopted = self.requires_grad and not self.then.grad
            if adopted:
                raise RuntimeError(f"{self.mark.name}: {_TAKEN}")
            modules = tuple({id(m): m for step in self.steps for m in step.modules}.values())
            key = tuple((step.name, step.arguments.tree, step.slots) for step in self.steps)
            if len(self.steps) == 1 and not self.mark.alone:
                inform_once(
                    f"broken chain {self.mark.name}",
                    f"{self.mark.name} is tiled without what follows it, which the block's code does not hand its output to directly:"
                    " leave it out of Tiling(targets=...)",
                )
            with self.then.restored():
                self._value = check_and_run(
                    TiledCall(Work(partial(_run, self.steps), modules, key), self.mark, self.tensors, {})
                )
            self._computed, self.steps, self.tensors = True, (), ()
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_GRAPH or (func is Tensor.register_hook and _only_tracks(args[1])):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pending = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Pending))
        if pending.open and _joins(pending, func, args, kwargs):
            return pending.joined(func, (), func.__name__, args, kwargs)
        value = pending.value()
        if not isinstance(value, Tensor):  # a tuple, which is about to be unpacked
            return getattr(value, func.__name__)(*args[1:], **kwargs)
        args, kwargs = values((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = values((args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Moment:
    """What the surroundings of a chain's steps were."""

    grad: bool
    autocast: AutocastState | None
    versions: tuple[int, ...]
    """Of the tensors."""
    sample: Tensor | None
    """Some of the input, where tensors have no versions: in inference mode."""

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> _Moment:
        first = tensors[0]
        sample = _few(first).clone() if first.is_inference() else None
        return cls(torch.is_grad_enabled(), AutocastState.now(first.device), _versions(tensors), sample)

    def with_more(self, tensors: Sequence[Tensor]) -> _Moment:
        """The same with the versions of tensors that came later."""
        return replace(self, versions=(*self.versions, *_versions(tensors[len(self.versions) :])))

    def is_now(self, tensors: Sequence[Tensor]) -> bool:
        return self.grad == torch.is_grad_enabled() and self.autocast == AutocastState.now(tensors[0].device)

    def check(self, tensors: Sequence[Tensor], name: str) -> None:
        """Raise if a tensor was changed in place since."""
        if _versions(tensors) != self.versions or (
            self.sample is not None and not torch.equal(self.sample, _few(tensors[0]))
        ):
            raise RuntimeError(
                f"{name}: its input was changed in place before its output was used. Change it out of place, or leave the module out of"
                " Tiling(targets=...)."
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        with torch.set_grad_enabled(self.grad), self.autocast.context() if self.autocast else nullcontext():
            yield


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(0 if t.is_inference() else t._version for t in tensors)


def _few(tensor: Tensor) -> Tensor:
    """The last entries, which any change of the whole changes."""
    return tensor[..., -1:, :1]


def _run(steps: Sequence[Step], *tensors: Tensor) -> Any:
    between = None
    for step in steps:
        between = step.run(tensors, between)
    return between


def values(tree: Any) -> Any:
    """The tree with the values of all that is pending in it."""
    if not any(isinstance(leaf, Pending) for leaf in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map_only(Pending, Pending.value, tree)


_ENTRYWISE = {F.dropout, F.gelu, F.relu, F.silu, F.elu, F.leaky_relu, F.mish, F.softplus, F.tanh, F.sigmoid}
_ENTRYWISE |= {torch.relu, torch.tanh, torch.sigmoid, torch.dropout, Tensor.relu, Tensor.tanh, Tensor.sigmoid}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_OF_THE_GRAPH = {
    Tensor.__dict__.get(name, getattr(torch._C.TensorBase, name)).__get__
    for name in ("requires_grad", "grad_fn", "is_leaf")
}
"""What module trackers (FlopCounterMode) ask of every module's output."""


def _only_tracks(hook: Any) -> bool:
    """Whether a gradient hook is that of torch's module tracker (FlopCounterMode's), which keeps account of modules,
    not of values.
    """
    function = getattr(hook, "__closure__", None) and inspect.getclosurevars(hook).nonlocals.get("fn")
    return getattr(function, "__module__", None) == "torch.utils.module_tracker"


def _joins(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function works entry by entry on the pending value, or adds the chain's own input to it, as a residual
    behind a norm is.
    """
    others = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not pending]
    if func in _ENTRYWISE:
        return not others and args[:1] == (pending,) and not kwargs.get("inplace")
    own = all(any(t is known for known in pending.tensors) and t.shape == pending.tensors[0].shape for t in others)
    return func in _SUMS and own and "out" not in kwargs


class JoinMark(Mark):
    """On a module that may run behind the first of a chain."""

    attribute = "_lt_tiled_join"

    def __init__(self, last: bool, owner: object) -> None:
        self.last = last
        """Whether the chain ends here and is run at once."""
        self.owner = owner


class SettleMark(Mark):
    """On the module whose forward runs the chain: nothing pending leaves it."""

    attribute = "_lt_tiled_settle"

    def __init__(self, owner: object) -> None:
        self.owner = owner


def _join(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    mark = self.__dict__[JoinMark.attribute]
    pending = next((value for value in (*args, *kwargs.values()) if isinstance(value, Pending)), None)
    if pending is None or not pending.open:
        return mark.inner(self, *args, **kwargs)
    joined = pending.joined(partial(mark.inner, self), (self,), type(self).__name__, args, kwargs)
    return joined.value() if mark.last else joined


def _settle(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        parts = [unwrapped(child) for child in self.children()]
        hooked = any(_hooked(m) for m in parts if get_mark(m, JoinMark) is not None)
        for m in parts:
            if (mark := get_mark(m, TileMark)) is not None:
                mark.hooked = hooked or _hooked(m)
                if mark.hooked and not mark.alone:
                    inform_once(
                        f"hooked {mark.name}", f"{mark.name} runs whole while there are hooks on what it consists of"
                    )
    return values(self.__dict__[SettleMark.attribute].inner(self, *args, **kwargs))


def _hooked(module: nn.Module) -> bool:
    """Whether hooks would get or keep what is pending, or hand it to a custom autograd Function, as full backward hooks
    do.
    """
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


_join.__name__ = _settle.__name__ = "forward"  # what pickle looks up on the class


def mark_chain(parent: nn.Module, members: Sequence[tuple[nn.Module, bool]], owner: object) -> None:
    """Let modules join a chain that runs in the parent's forward; each comes with whether the chain ends there."""
    for module, last in members:
        if get_mark(module, JoinMark) is None:
            set_mark(module, JoinMark(last, owner), _join)
    if get_mark(parent, SettleMark) is None:
        set_mark(parent, SettleMark(owner), _settle, innermost=True)


def unmark_chains(module: nn.Module, owner: object) -> None:
    """Undo :func:`mark_chain` for one module."""
    for kind, function in ((JoinMark, _join), (SettleMark, _settle)):
        if any(mark.owner is owner for mark in get_marks(module, kind)):
            remove_mark(module, kind, function)


def begin_chain(call: TiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
    """Put off a call of a chain's first module."""
    found, arguments = split_arguments(args, kwargs)
    tensors = tuple({id(t): t for t in found}.values())
    slots = tuple(next(i for i, known in enumerate(tensors) if known is t) for t in found)
    step = Step(call.work.function, arguments, slots, call.work.modules, call.mark.kind)
    return Pending.of(call.mark, (step,), tensors, _Moment.now(tensors))


def gives_a_tensor(call: TiledCall) -> bool:
    """Whether the module returns one tensor, as a pending value stands for.

    The self-check has seen what it returns. Without one only mixtures of experts, which may return router logits, are
    tried, on two tokens.
    """
    mark = call.mark
    if mark.tiling.self_check:
        return not mark.layouts
    if mark.below and mark.gives_a_tensor is None:
        with torch.no_grad(), random_state_kept(call.device):
            output = call.run_tile(call.cut(call.flat(call.inputs), slice(0, 2)))
        mark.gives_a_tensor = isinstance(output, Tensor)
    return mark.gives_a_tensor is not False
