"""Tensors as flat bytes, and back with their values, strides and overlaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # the planner's tensors; torch names them in no public module

MAX_WASTE = 4
"""A view stays on the device if its span has more than this many times its own elements."""


@dataclass(frozen=True)
class Geometry:
    """The metadata that turns bytes into a tensor again."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def span(self) -> int:
        """The number of elements from the first to the last in memory, including those between that it skips."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize

    def rebuild(self, raw: Tensor) -> Tensor:
        """Return the tensor whose span is in ``raw``. The two share memory."""
        return raw.view(self.dtype).as_strided(self.size, self.stride)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's span as a flat ``uint8`` tensor that shares its memory."""
    span = Geometry.of(tensor).span
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)


def movable(tensor: Tensor) -> bool:
    """Return whether the tensor can be restored from its bytes and its :class:`Geometry`.

    Subclasses, lazy conjugates, and sparse, nested, quantized and functorch tensors have more than those.
    """
    if type(tensor) not in (Tensor, FakeTensor) or tensor.layout is not torch.strided or storage_key(tensor) is None:
        return False
    if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return False
    return 0 < Geometry.of(tensor).span <= MAX_WASTE * tensor.numel()


def storage_key(tensor: Tensor) -> int | None:
    """Return a number that the tensors of one storage share, while the storage is alive; ``None`` without a storage."""
    try:
        key: int = tensor.untyped_storage()._cdata  # data_ptr() is 0 for all empty storages and fails for fake tensors
    except (NotImplementedError, RuntimeError):  # of sparse tensors and functorch's
        return None
    return key


def view_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same view of one storage."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
