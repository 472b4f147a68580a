"""Saved tensors as flat bytes: which tensors can be restored from them, and which are the same."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # the planner's tensors; torch names them in no public module

MAX_WASTE = 4  # a view stays on the device if its span has more than this many times its own elements


def span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory, including those that a view skips."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return last + 1


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's span as a flat ``uint8`` tensor that shares its memory."""
    return tensor.detach().as_strided((span(tensor),), (1,), tensor.storage_offset()).view(torch.uint8)


def movable(tensor: Tensor) -> bool:
    """Return whether the tensor can be restored from its bytes, shape, strides and dtype.

    Subclasses, lazy conjugates, and sparse, nested, quantized and functorch tensors have more than those.
    """
    if type(tensor) not in (Tensor, FakeTensor) or tensor.layout is not torch.strided or storage_key(tensor) is None:
        return False
    if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return False
    return 0 < span(tensor) <= MAX_WASTE * tensor.numel()


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
