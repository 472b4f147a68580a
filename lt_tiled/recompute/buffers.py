"""Buffers as a forward pass found them, and attributes as a check or a step found them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

SMALL = 2**20
"""The most bytes of a buffer that is copied in each forward pass of a block."""
Held = dict[str, tuple[Tensor | None, Tensor | None]]
"""The buffers of a module by name, each with its copy."""


class Buffers:
    """The buffers of modules as they are now, with copies.

    Args:
        modules: The modules, without their submodules.
        most: Larger ones have no copy; the same tensor is put back, whatever was written to it.
    """

    def __init__(self, modules: Iterable[nn.Module], most: float = SMALL) -> None:
        self.held: list[tuple[nn.Module, Held]] = []
        self.ids: set[int] = set()
        """Of the tensors themselves, which live as long as this."""
        for module in modules:
            held: Held = {}
            for name, buffer in module._buffers.items():
                # One with a graph is replaced, not written to.
                copied = buffer is not None and not buffer.requires_grad and buffer.nbytes <= most
                if copied:
                    self.ids.add(id(buffer))
                held[name] = buffer, buffer.detach().clone() if copied and buffer is not None else None
            self.held.append((module, held))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let modules find these values in tensors of their own, and put back what is there now."""
        before = [(module, dict(module._buffers)) for module, _ in self.held]
        for module, held in self.held:
            values: dict[str, Tensor | None] = {}
            for name, (buffer, copy) in held.items():
                values[name] = buffer if copy is None else copy.clone()
            _set(module, values)
        try:
            yield
        finally:
            for module, values in before:
                _set(module, values)

    def put_back(self) -> None:
        """Write these values to the same tensors, and put these back into their places."""
        for module, held in self.held:
            _set(module, {name: buffer for name, (buffer, _) in held.items()})
            for buffer, copy in held.values():
                if buffer is not None and copy is not None:
                    buffer.data.copy_(copy)


class ModuleState:
    """The buffers and attributes of modules, training modes among them, as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.buffers = Buffers(modules, math.inf)
        self.attributes = [(module, dict(vars(module)), set(module._forward_hooks)) for module in modules]

    def put_back(self) -> None:
        """Let modules have these again. What containers in attributes hold stays."""
        for module, attributes, hooks in self.attributes:
            vars(module).clear()
            vars(module).update(attributes)
            # transformers sets hooks in a model's first call, and notes in an attribute that it has.
            for key in module._forward_hooks.keys() - hooks:
                del module._forward_hooks[key]
        self.buffers.put_back()


def _set(module: nn.Module, values: dict[str, Tensor | None]) -> None:
    if module._buffers or values:
        module._buffers.clear()
        module._buffers.update(values)
