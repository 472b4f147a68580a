"""Marking a module: `forward` is replaced on the instance, and all that the replacement needs hangs on the module.

The replacement is a bound method named ``forward`` that reaches its state through ``self``. So ``copy.deepcopy`` rebinds it to
the copy, a pickled module comes back plain, and the keys, class and hooks of the module stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any, ClassVar, TypeVar

from torch import nn

MarkType = TypeVar("MarkType", bound="Mark")


class Mark:
    """What a marked module carries. One subclass for each way of running a module differently."""

    attribute: ClassVar[str]
    """Where the mark hangs on the module."""
    replaced: Callable[..., Any] | None = None
    """An instance-level ``forward`` that was there before (Liger, kernels): kept, called, and put back."""
    active = True

    def inner(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, without the module's hooks."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__, replaced=deepcopy(self.replaced, memo))
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled module must load where lt_tiled is not installed


def get_mark(module: nn.Module, kind: type[MarkType]) -> MarkType | None:
    """The module's mark of that kind, if it is marked."""
    mark: MarkType | None = module.__dict__.get(kind.attribute)
    return mark if mark is not None and mark.active else None


def set_mark(module: nn.Module, mark: Mark, forward: Callable[..., Any]) -> None:
    """Hang ``mark`` on the module and let ``forward`` (a function named ``forward``) run it."""
    current, old = module.__dict__.get("forward"), module.__dict__.get(mark.attribute)
    module.__dict__[mark.attribute] = mark
    if old is not None and current is not None:  # somebody's forward stands before ours, which is still in place
        mark.replaced = old.replaced
        return
    mark.replaced = current
    module.__dict__["forward"] = MethodType(forward, module)


def remove_mark(module: nn.Module, kind: type[Mark], forward: Callable[..., Any]) -> None:
    """Take the mark off again; nothing is left behind unless somebody replaced ``forward`` since."""
    mark = get_mark(module, kind)
    if mark is None:
        return
    if _is(module.__dict__.get("forward"), forward):
        if mark.replaced is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = mark.replaced
    else:
        above = [m for m in module.__dict__.values() if isinstance(m, Mark) and _is(m.replaced, forward)]
        if not above:
            mark.active = False  # theirs may call ours, which from now on only passes the call through
            return
        above[0].replaced = mark.replaced
    del module.__dict__[kind.attribute]


def _is(method: Any, function: Callable[..., Any]) -> bool:
    return getattr(method, "__func__", None) is function
