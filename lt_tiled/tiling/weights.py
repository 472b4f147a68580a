"""The weights of a tiled module: found anew at each call, because engines swap the tensors behind the names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Weight:
    """One trainable tensor and every place in the module that holds it (tied weights have several)."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    version: int = 0

    def read(self) -> Tensor:
        """The tensor that stands in this place now.

        Raises:
            RuntimeError: If the weight was changed in place since the forward, so that no right gradient can be had.
        """
        owner, name = self.places[0]
        tensor: Tensor = getattr(owner, name)
        if tensor is self.tensor and tensor._version != self.version:
            raise RuntimeError(
                f"The weight {type(owner).__name__}.{name} of shape {list(tensor.shape)} was changed in place between the forward and"
                f" the backward of a tiled module (version {self.version}, now {tensor._version}): step the optimizer after the backward."
            )
        return tensor


def trainable_weights(module: nn.Module) -> list[Weight]:
    """The tensors of the module that want a gradient, each once.

    Plain tensor attributes count too: FSDP with ``use_orig_params=False`` keeps its views of the flat weights there.
    """
    found: dict[int, Weight] = {}
    for owner in module.modules():
        slots = [*owner._parameters.items(), *((n, v) for n, v in owner.__dict__.items() if isinstance(v, Tensor))]
        for name, tensor in slots:
            if tensor is not None and tensor.requires_grad:
                found.setdefault(id(tensor), Weight(tensor, version=tensor._version)).places.append((owner, name))
    return list(found.values())


@contextmanager
def substituted(weights: Sequence[Weight], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let the module see ``tensors`` in place of its weights."""
    slots = [(_holder(*place), place[1], tensor) for w, tensor in zip(weights, tensors, strict=True) for place in w.places]
    before = [holder[name] for holder, name, _ in slots]
    try:
        for holder, name, tensor in slots:
            holder[name] = tensor
        yield
    finally:
        for (holder, name, _), tensor in zip(slots, before, strict=True):
            holder[name] = tensor


def _holder(owner: nn.Module, name: str) -> dict[str, Any]:
    return owner._parameters if name in owner._parameters else owner.__dict__


class GradientSum:
    """Sums one tensor's gradients over the tiles while autograd produces them, so that only one tile's is alive beside the sum.

    The leaf's hook adds the tile's gradient to the sum and hands autograd a stand-in of no size. Sums of 16-bit gradients
    are kept in float32 and rounded once: summed in their own dtype their error grows with the number of tiles.
    """

    def __init__(self, tensor: Tensor, accumulate: str) -> None:
        self.dtype = tensor.dtype
        wide = accumulate == "float32" and tensor.dtype in (torch.bfloat16, torch.float16)
        self.sum_dtype = torch.float32 if wide else tensor.dtype
        self.sum: Tensor | None = None
        self.leaf = tensor.detach().requires_grad_()
        self._nothing = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(self.leaf)
        self._handle = self.leaf.register_hook(self._add)

    def _add(self, gradient: Tensor) -> Tensor:
        if self.sum is None:
            self.sum = gradient.to(self.sum_dtype, memory_format=torch.contiguous_format, copy=True)
        else:
            self.sum.add_(gradient)
        return self._nothing

    def take(self) -> Tensor | None:
        """The sum in the tensor's own dtype; ``None`` if no tile used the tensor."""
        total, self.sum = self.sum, None
        return None if total is None else total.to(self.dtype)

    def close(self) -> None:
        """Part the leaf from this object: together they keep each other alive."""
        self._handle.remove()
