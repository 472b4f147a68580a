"""Patch and restore a module: one method on the instance runs the patches of that method, in a fixed order.

NOTE [The order of patches]
Several patches may change one method, which is mostly ``forward``. They run in the order of :class:`Order`, whichever
was set first, and the innermost one calls the module's own method. In place of the method there is one bound method of
the same name, which reaches the patches through ``self``. So ``copy.deepcopy`` rebinds it to the copy, a pickled module
loads as a plain one, and keys, class and hooks stay. Where other code later puts a method of its own above ours, all
patches run where it calls ours.

NOTE [Compiled modules]
In compiled code, patched methods run uncompiled, with all that they call: patches are Python with side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from enum import IntEnum, auto
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lt_tiled._log import inform

PatchType = TypeVar("PatchType", bound="Patch")

_PLACE = "_lt_tiled_"
"""With the name of a method: the attribute of a module that holds the outermost patch of that method."""


def is_of(hook: Any, packages: tuple[str, ...]) -> bool:
    """Whether a hook was defined in one of these packages, and not by a user."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(packages)


def has_hooks(module: nn.Module, apart_from: tuple[str, ...] = ()) -> bool:
    """Whether there are hooks on a module that were not defined in one of these packages."""
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for hook in module.__dict__[kind].values():
            if not is_of(hook, apart_from):
                return True
    return False


class Order(IntEnum):
    """The patches of a method, from the outermost to the innermost."""

    DOOR = auto()  # ranks begin to share the sequences of a model, or of its blocks
    DECODER = auto()  # router logits of shared sequences are those of all tokens
    CHECKPOINT = auto()  # a block is recomputed in the backward pass, with all that follows
    CALLER = auto()  # a model notes whether its caller wants a loss
    PARENT = auto()  # what is pending inside of a block is computed before the block returns
    HEAD = auto()  # a head defers its logits
    TILE = auto()  # a module runs in tiles, alone or in those of the module next to it
    LEAF = auto()  # a module takes hooks of ZeRO-3 in another way


class Patch:
    """One change of a method of a module. One subclass for each way of running a module differently."""

    order: ClassVar[Order]
    method = "forward"
    """What is changed."""
    below: Patch | Callable[..., Any] | None = None
    """What runs next: a patch, a method that was set on the instance before (Liger, kernels), or the class's own."""
    active = True
    owner: Any = None
    """The object that set the patch and removes it."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.run(module, args, kwargs) if self.active else self.inner(module, *args, **kwargs)

    def inner(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run what this patch changes, without the module's hooks."""
        return self.bound(module)(*args, **kwargs)

    def bound(self, module: nn.Module) -> Callable[..., Any]:
        """Return what this patch changes as a method, without the module's hooks."""
        if isinstance(self.below, Patch):
            return partial(self.below, module)
        return self.below or MethodType(getattr(type(module), self.method), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        memo[id(self)] = copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, below=deepcopy(self.below, memo))
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled module must load where lt_tiled is not installed


def set_patch(module: nn.Module, patch: Patch, method: str = "forward") -> None:
    """Let a patch run in its place among the patches of a method."""
    patch.method = method
    place = _PLACE + method
    if module.__dict__.get(place) is None:
        replaced = module.__dict__.get(method)
        changed = getattr(replaced, "__func__", getattr(type(module), method))
        module.__dict__[place] = replaced
        module.__dict__[method] = MethodType(_dispatcher(method, changed), module)
    # Of two patches with the same place the later one is outside.
    _link(module, place, [patch, *_chain(module.__dict__[place])])


def remove_patch(module: nn.Module, patch: Patch) -> None:
    """Remove a patch. With the last one of a method the method is restored, unless other code was put above."""
    method = patch.method
    place = _PLACE + method
    _link(module, place, [other for other in _chain(module.__dict__[place]) if other is not patch])
    own = module.__dict__[place]
    if isinstance(own, Patch):
        return
    if is_of(module.__dict__.get(method), (__name__,)):
        del module.__dict__[place], module.__dict__[method]
        if own is not None:
            module.__dict__[method] = own
    else:
        # What was put above calls it still, and patches that are set later run in its place.
        module.__dict__[place] = own or MethodType(getattr(type(module), method), module)


def remove_patches(model: nn.Module, owner: object) -> None:
    """Remove all patches of an owner, on copies of modules (peft's ``modules_to_save``) too."""
    for module in model.modules():
        for patch in get_patches(module, Patch):
            if patch.owner is owner:
                remove_patch(module, patch)


def patch_until(undo: ExitStack, module: nn.Module, patch: Patch) -> None:
    """Set a patch that is removed when ``undo`` is closed."""
    set_patch(module, patch)
    undo.callback(remove_patch, module, patch)


def get_patches(module: nn.Module, kind: type[PatchType]) -> list[PatchType]:
    """Return the active patches of that kind on any of the module's methods."""
    found: list[PatchType] = []
    for value in module.__dict__.values():
        for patch in _chain(value):
            if isinstance(patch, kind) and patch.active:
                found.append(patch)
    return found


def get_patch(module: nn.Module, kind: type[PatchType], method: str = "forward") -> PatchType | None:
    """Return the active patch of that kind on one of the module's methods, if there is one."""
    for patch in get_patches(module, kind):
        if patch.method == method:
            return patch
    return None


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


def roots(module: nn.Module, parts: Sequence[str] | None) -> tuple[nn.Module, ...]:
    """Return the parts of a module with these paths, or the module itself if there are none to choose."""
    return (module,) if parts is None else tuple(module.get_submodule(path) for path in parts)


def _link(module: nn.Module, place: str, patches: list[Patch]) -> None:
    """Let patches run in their order, and then what runs below them now; of equal ones the first is outside."""
    below = module.__dict__[place]
    for patch in _chain(below):
        below = patch.below
    for patch in sorted(patches, key=lambda patch: patch.order)[::-1]:
        patch.below = below
        below = patch
    module.__dict__[place] = below


def _chain(value: Any) -> Iterator[Patch]:
    """Yield the patches of a method, beginning with this one if it is one."""
    while isinstance(value, Patch):
        yield value
        value = value.below


def _dispatcher(name: str, changed: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs the patches of a method.

    Its name is what pickle looks up on the class. It has the signature of the method that is changed, from which
    transformers reads the arguments.
    """

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        below = self.__dict__[_PLACE + name]
        exporting = torch.compiler.is_exporting()
        while exporting and isinstance(below, Patch):  # torch.export sees the module's own code
            below = below.below
        if isinstance(below, Patch):
            return _run(torch.compiler.is_compiling(), below, self, args, kwargs)
        own = below or MethodType(getattr(type(self), name), self)
        return own(*args, **kwargs)

    method.__name__ = name
    method.__signature__ = signature(changed)  # type: ignore[attr-defined]
    return method


@partial(torch.compiler.disable, reason="lt_tiled runs the module in its own way: see docs/models.md")
def _run(compiling: bool, patch: Patch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run patches, and all that they call, uncompiled."""
    if compiling:
        inform("lt_tiled runs patched modules uncompiled in compiled code: see docs/models.md.", once="uncompiled")
    return patch(module, *args, **kwargs)
