"""The buffers of a block as its forward pass found them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

SMALL = 2**20
"""The most bytes of a buffer that is copied. Of a larger one the tensor is put back, whatever was written to it."""
Values = dict[str, Tensor | None]


class Buffers:
    """The buffers of modules as they are now, without those of their submodules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.values = [(module, _copied(module._buffers)) for module in modules]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let modules find these values in tensors of their own, and put back what is there now."""
        before: list[tuple[nn.Module, Values]] = []
        for module, values in self.values:
            before.append((module, dict(module._buffers)))
            _set(module, _copied(values))
        try:
            yield
        finally:
            for module, values in before:
                _set(module, values)


def _copied(buffers: Mapping[str, Tensor | None]) -> Values:
    """Return buffers with copies of the small ones. One with a graph is replaced by code, not written to."""
    values = dict(buffers)
    for name, buffer in buffers.items():
        if buffer is not None and not buffer.requires_grad and buffer.nbytes <= SMALL:
            values[name] = buffer.detach().clone()
    return values


def _set(module: nn.Module, values: Values) -> None:
    if module._buffers or values:
        module._buffers.clear()
        module._buffers.update(values)
