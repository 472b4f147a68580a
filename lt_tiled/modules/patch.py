"""Patch and restore a module: one method on the instance runs the patches of that method, in a fixed order.

NOTE [The order of patches]
Several patches may change one method, which is mostly ``forward``. They run in the order of :class:`Order`, whichever
was set first, and the innermost one calls the module's own method. In place of the method there is one bound method of
the same name, which reaches the patches through ``self``. So ``copy.deepcopy`` rebinds it to the copy, a pickled module
loads as a plain one, and keys, class and hooks stay. Where other code puts a method of its own above ours, patches that
are set later run above theirs.

NOTE [Compiled modules]
``torch.compile`` breaks its graph at patches: they are Python with side effects, of which the compiler would make many
graphs, and each block's recompute must run the code of its forward pass. So no patch is compiled, and the module's own
code below the patches is, by the compiler that was at work above them, in the recompute too. Patches that only matter
to uncompiled code, as on norms that the compiler fuses anyway, are left out of the graph instead. In a compiled
training step the compiler is at work in the backward pass as well, so what autograd calls there turns it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from enum import IntEnum, auto
from functools import cache, partial
from inspect import Parameter, signature
from itertools import count
from types import MethodType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame  # no public names
from torch._dynamo.decorators import skip  # torch.compiler.disable does not tell what was disabled

PatchType = TypeVar("PatchType", bound="Patch")
Function = TypeVar("Function", bound=Callable[..., Any])


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold its hooks."""


def is_of(hook: Any, packages: tuple[str, ...]) -> bool:
    """Whether a hook was defined in one of these packages, and not by a user."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(packages)


compiler: ContextVar[Any] = ContextVar("compiler", default=None)
"""What compiles the module's own code below the patches that run; see NOTE [Compiled modules]."""


@contextmanager
def uncompiled(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a mode, at which the compiler breaks its graph for each operation, or from which it hides operations."""
    token = compiler.set(None)
    try:
        with mode:
            yield
    finally:
        compiler.reset(token)


def without_compiler(function: Function) -> Function:
    """Return a function that runs uncompiled wherever it is called, with all that it calls."""
    return cast(Function, torch.compiler.disable(function))


class Order(IntEnum):
    """The patches of a method, from the outermost to the innermost."""

    SEQUENCE = auto()
    """Ranks share the sequences of a model, or of its blocks."""
    POSITIONS = auto()
    """Masks and rotary tables of shared sequences are those of all tokens."""
    CACHE = auto()
    """A model notes whether its caller wants a key-value cache."""
    CHECKPOINT = auto()
    """A block is recomputed in the backward pass, with all that follows."""
    LOSS = auto()
    """A model notes whether its caller wants a loss."""
    STATES = auto()
    """Layers with a state exchange tokens between ranks."""
    PARENT = auto()
    """What modules inside deferred is computed before the module returns."""
    HEAD = auto()
    """A head defers its logits."""
    NEIGHBOR = auto()
    """A norm or a projection runs in the tiles of the module next to it."""
    TILE = auto()
    """A module runs in tiles."""
    LEAF = auto()
    """A module takes hooks of ZeRO-3 in another way."""


class Patch:
    """One change of a method of a module. One subclass for each way of running a module differently."""

    order: ClassVar[Order]
    method = "forward"
    """What is changed."""
    below: Patch | Callable[..., Any] | None = None
    """What runs next: a patch, a method that was set on the instance before (Liger, kernels), or the class's own."""
    active = True
    fuses = False
    """Whether compiled code goes past it to what it changes."""
    owner: Any = None
    """The object that set the patch and removes it."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.run(module, args, kwargs) if self.active else self.inner(module, *args, **kwargs)

    def inner(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run what this patch changes, without the module's hooks."""
        if isinstance(self.below, Patch):
            return self.below(module, *args, **kwargs)
        function, compiles = self.bound(module), compiler.get()
        if compiles is None:
            return function(*args, **kwargs)
        token, before = compiler.set(None), set_eval_frame(compiles)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)
            compiler.reset(token)

    def bound(self, module: nn.Module) -> Callable[..., Any]:
        """Return what this patch changes as a method, without the module's hooks."""
        if isinstance(self.below, Patch):
            return partial(self.below, module)
        return _own(module, self.method) if self.below is None else self.below

    @property
    def replaced(self) -> Callable[..., Any] | None:
        """The method that was set on the instance before the patches, if there was one."""
        return self.below.replaced if isinstance(self.below, Patch) else self.below

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__, below=deepcopy(self.below, memo))
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled module must load where lt_tiled is not installed


class SharedPatch(Patch):
    """A patch that several owners may set, and that is there until the last of them removes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The name in messages."""
        self.owners: dict[object, Any] = {}
        """The owners, and what each asked for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = super().__deepcopy__(memo)
        copy.__dict__["owners"] = dict(self.owners)
        return copy


def roots(module: nn.Module, parts: Sequence[str] | None) -> tuple[nn.Module, ...]:
    """Return the parts of a module with these paths, or the module itself if there are none to choose."""
    return (module,) if parts is None else tuple(module.get_submodule(path) for path in parts)


def get_patches(module: nn.Module, kind: type[PatchType]) -> list[PatchType]:
    """Return the active patches of that kind on any of the module's methods."""
    found = []
    for value in module.__dict__.values():
        while isinstance(value, Patch):
            if isinstance(value, kind) and value.active:
                found.append(value)
            value = value.below
    return found


def get_patch(module: nn.Module, kind: type[PatchType], method: str = "forward") -> PatchType | None:
    """Return the active patch of that kind on one of the module's methods, if there is one."""
    return next((patch for patch in get_patches(module, kind) if patch.method == method), None)


@contextmanager
def turned_off(model: nn.Module, kind: type[Patch] = Patch) -> Iterator[None]:
    """Let the patches of that kind in a model pass calls on to what they change, for a while."""
    patches = [patch for module in model.modules() for patch in get_patches(module, kind)]
    for patch in patches:
        patch.active = False
    try:
        yield
    finally:
        for patch in patches:
            patch.active = True


def set_patch(module: nn.Module, patch: Patch, method: str = "forward") -> None:
    """Let a patch run in its place among the patches of a method."""
    patch.method = method
    replaced = module.__dict__.get(method)
    place = _place(replaced)
    if place is None:
        place = next(p for n in count() if (p := f"_lt_tiled_{n}_{method}") not in module.__dict__)
        module.__dict__[place] = replaced
    above, below = None, module.__dict__[place]
    while isinstance(below, Patch) and below.order < patch.order:
        above, below = below, below.below
    patch.below = below
    if above is None:
        module.__dict__[place] = patch
    else:
        above.below = patch
    everything = get_patches(module, Patch)
    fuses = all(other.fuses for other in everything if other.method == method)
    if (replaced := patch.replaced) is None:
        dispatcher = _dispatcher_of_class(place, method, getattr(type(module), method), False, fuses)
    else:
        dispatcher = _dispatcher(place, method, replaced, True, fuses)
    module.__dict__[method] = MethodType(dispatcher, module)


def remove_patch(module: nn.Module, patch: Patch) -> None:
    """Remove a patch. With the last one of a method the method is restored, unless other code was put above."""
    for place, value in list(module.__dict__.items()):
        if value is patch:
            module.__dict__[place] = patch.below
        while isinstance(value, Patch):
            if value.below is patch:
                value.below = patch.below
            value = value.below
    own = _place(module.__dict__.get(patch.method))
    if own is not None and not isinstance(replaced := module.__dict__[own], Patch):
        del module.__dict__[own], module.__dict__[patch.method]
        if replaced is not None:
            module.__dict__[patch.method] = replaced


def patch_until(undo: ExitStack, module: nn.Module, patch: Patch) -> None:
    """Set a patch that is removed when ``undo`` is closed."""
    set_patch(module, patch)
    undo.callback(remove_patch, module, patch)


def remove_patches(module: nn.Module, kind: type[Patch]) -> None:
    """Remove all patches of that kind."""
    for patch in get_patches(module, kind):
        remove_patch(module, patch)


def _own(module: nn.Module, method: str) -> Callable[..., Any]:
    return MethodType(getattr(type(module), method), module)


def _dispatcher(place: str, name: str, changed: Callable[..., Any], bound: bool, fuses: bool) -> Callable[..., Any]:
    """Return the function that runs the patches in an attribute of a module.

    Its name is what pickle looks up on the class. It has the signature of the method that is changed, from which
    transformers reads the arguments.
    """

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        below, compiles = self.__dict__[place], get_eval_frame_callback()
        if not isinstance(below, Patch):  # under other code, when all patches are removed
            return (below or _own(self, name))(*args, **kwargs)
        if compiles is None and compiler.get() is None:
            return below(self, *args, **kwargs)
        token, before = compiler.set(compiles), set_eval_frame(None)
        try:
            return below(self, *args, **kwargs)
        finally:
            set_eval_frame(before)
            compiler.reset(token)

    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        below = self.__dict__[place]
        if not torch.compiler.is_compiling():
            if get_eval_frame_callback() is not None:  # the compiler skips the code above, as in a mode
                return method(self, *args, **kwargs)
            return (below or _own(self, name))(*((self,) if isinstance(below, Patch) else ()), *args, **kwargs)
        while isinstance(below, Patch):
            below = below.below
        return getattr(type(self), name)(self, *args, **kwargs) if below is None else below(*args, **kwargs)

    skip(method)
    function: Callable[..., Any] = fused if fuses else method
    function.__name__ = name
    function.__dict__["_lt_tiled_place"] = place
    function.__dict__["_torchdynamo_disable_msg"] = "lt_tiled runs the module in its own way: see docs/models.md"
    with suppress(TypeError, ValueError):  # a callable that tells no signature
        found = signature(changed)
        own = [Parameter("self", Parameter.POSITIONAL_ONLY)] if bound else []
        function.__dict__["__signature__"] = found.replace(parameters=[*own, *found.parameters.values()])
    return function


_dispatcher_of_class = cache(_dispatcher)
"""The modules of a class have one function, unless other code set a method on the instance."""


def _place(method: Any) -> str | None:
    """Return the attribute of a module with the patches that a method runs, if it runs any."""
    return getattr(method.__func__, "__dict__", {}).get("_lt_tiled_place") if type(method) is MethodType else None


def is_patched(method: Any) -> bool:
    """Whether a value is what :func:`set_patch` puts in place of a method."""
    return _place(method) is not None
