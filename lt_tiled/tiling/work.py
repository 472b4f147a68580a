"""What one tiled call does to each of its tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lt_tiled._renamed import deprecated

__getattr__ = deprecated(__name__, {"NotTokenWise": "lt_tiled.errors.NotPositionWiseError"})


@dataclass(frozen=True)
class Work:
    """A function of tensors that works token by token: a module's forward, another method, a chain of modules, any
    callable.
    """

    function: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    """Those that hold its weights."""
    key: Hashable = None
    """Tells calls of one mark apart that do different things."""

    def parts(self) -> Iterator[nn.Module]:
        """The modules and all that is in them."""
        for module in self.modules:
            yield from module.modules()

    @property
    def training(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self.modules)
