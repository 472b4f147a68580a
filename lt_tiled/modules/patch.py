"""Patch and restore a module: ``forward``, or another method, is replaced on the instance.

The replacement is a bound method of the same name that reaches its state, the patch, through ``self``. So
``copy.deepcopy`` rebinds it to the copy, a pickled module loads as a plain one, and keys, class and hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from inspect import Parameter, Signature, signature
from types import FunctionType, MethodType
from typing import Any, ClassVar, TypeVar

from torch import nn

PatchType = TypeVar("PatchType", bound="Patch")


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold its hooks."""


def is_of(hook: Any, packages: tuple[str, ...]) -> bool:
    """Whether a hook was defined in one of these packages, and not by a user."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(packages)


class Patch:
    """What a patched module carries. One subclass for each way of running a module differently."""

    attribute: ClassVar[str]
    """The attribute of the module that holds a patch of ``forward``."""
    method = "forward"
    """What is replaced."""
    replaced: Callable[..., Any] | None = None
    """An instance-level ``forward`` that was there before (Liger, kernels): called, and restored."""
    active = True
    owner: object = None
    """The object that set the patch and removes it."""

    def inner(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own method, without the module's hooks."""
        return self.bound(module)(*args, **kwargs)

    def bound(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's own method, without the module's hooks."""
        return MethodType(getattr(type(module), self.method), module) if self.replaced is None else self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__, replaced=deepcopy(self.replaced, memo))
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


def place_of(kind: type[Patch], method: str = "forward") -> str:
    """Return the attribute of the module that holds the patch of a method."""
    return kind.attribute if method == "forward" else f"{kind.attribute}_{method}"


def get_patch(module: nn.Module, kind: type[PatchType], method: str = "forward") -> PatchType | None:
    """Return the patch of that kind on one of the module's methods, if there is one."""
    patch: PatchType | None = module.__dict__.get(place_of(kind, method))
    return patch if patch is not None and patch.active else None


def get_patches(module: nn.Module, kind: type[PatchType]) -> list[PatchType]:
    """Return the patches of that kind on any of the module's methods."""
    return [patch for patch in module.__dict__.values() if isinstance(patch, kind) and patch.active]


@contextmanager
def turned_off(model: nn.Module, kind: type[Patch] = Patch) -> Iterator[None]:
    """Let the patches of that kind in a model pass calls on to what they replaced, for a while."""
    patches = [patch for module in model.modules() for patch in get_patches(module, kind)]
    for patch in patches:
        patch.active = False
    try:
        yield
    finally:
        for patch in patches:
            patch.active = True


def set_patch(module: nn.Module, patch: Patch, function: Callable[..., Any], innermost: bool = False) -> None:
    """Replace a method of the module.

    Args:
        module: The module.
        patch: What it carries.
        function: Runs in place of the method of the same name.
        innermost: Patch below other patches of the method, instead of above.
    """
    place, method = place_of(type(patch), function.__name__), function.__name__
    current, old = module.__dict__.get(method), module.__dict__.get(place)
    module.__dict__[place], patch.method = patch, method
    if old is not None and current is not None:  # another forward was put above ours, which is still there
        patch.replaced = old.replaced
        return
    above = [m for m in get_patches(module, Patch) if m is not patch and m.method == method] if innermost else []
    if above:
        patch.replaced = above[0].replaced
        above[0].replaced = _bound(function, module, patch.replaced)
        return
    patch.replaced = current
    module.__dict__[method] = _bound(function, module, current)


def remove_patch(module: nn.Module, kind: type[Patch], function: Callable[..., Any]) -> None:
    """Restore the method; nothing is left behind unless other code replaced it since."""
    method = function.__name__
    patch = get_patch(module, kind, method)
    if patch is None:
        return
    if _is(module.__dict__.get(method), function):
        if patch.replaced is None:
            del module.__dict__[method]
        else:
            module.__dict__[method] = patch.replaced
    else:
        above = [m for m in module.__dict__.values() if isinstance(m, Patch) and _is(m.replaced, function)]
        if not above:
            patch.active = False  # theirs may call ours, which only passes calls on now
            return
        above[0].replaced = patch.replaced
    del module.__dict__[place_of(kind, method)]


def _bound(function: Callable[..., Any], module: nn.Module, replaced: Callable[..., Any] | None) -> MethodType:
    """Return the function as a method, with the signature of what it replaces: transformers reads arguments from it."""
    if replaced is None:
        cls: Any = type(module)
        return MethodType(_with_signature(function, cls), module)
    return MethodType(_copied(function, lambda: _with_self(signature(replaced))), module)


@cache
def _with_signature(function: Callable[..., Any], cls: Any) -> FunctionType:
    return _copied(function, lambda: signature(getattr(cls, function.__name__)))


def _copied(function: Callable[..., Any], read: Callable[[], Signature]) -> FunctionType:
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__dict__["stands_for"] = function
    with suppress(TypeError, ValueError):  # a callable that tells no signature
        copy.__dict__["__signature__"] = read()
    return copy


def _with_self(of: Signature) -> Signature:
    return of.replace(parameters=[Parameter("self", Parameter.POSITIONAL_ONLY), *of.parameters.values()])


def is_patched(method: Any) -> bool:
    """Whether a value is what :func:`set_patch` puts in place of a method."""
    return type(method) is MethodType and "stands_for" in getattr(method.__func__, "__dict__", ())


def _is(method: Any, function: Callable[..., Any]) -> bool:
    return getattr(getattr(method, "__func__", None), "stands_for", None) is function
