"""A tensor as bytes, and the same tensor from bytes: values, strides and overlaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # what the planner runs models on

MAX_WASTE = 4
"""A view whose first and last entry lie further apart than this many times its own size is left where it is."""


@dataclass(frozen=True)
class Geometry:
    """What it takes to make a tensor of its bytes."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @property
    def span(self) -> int:
        """Entries from the first to the last, those between them that belong to other views included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize

    def rebuild(self, raw: Tensor) -> Tensor:
        """The tensor whose span ``raw`` holds, as bytes; the two share memory."""
        return raw.view(self.dtype).as_strided(self.size, self.stride)


def movable(tensor: Tensor) -> bool:
    """Whether the tensor is a plain one whose bytes say all: no subclass, no lazy conjugation, no sparse layout, not
    empty.
    """
    if type(tensor) not in (Tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return False
    return Geometry.of(tensor).span <= MAX_WASTE * tensor.numel()


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's span as a flat ``uint8`` tensor that shares its memory."""
    span = Geometry.of(tensor).span
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)
