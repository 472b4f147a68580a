"""The weights of a tiled module: found anew at each call, because engines swap the tensors behind the names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lt_tiled.tiling.state import Work


@dataclass
class Weight:
    """One trainable tensor and every place in the modules that holds it (tied weights have several)."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def unchanged_since(self, version: int) -> Tensor:
        """Return the tensor that the forward pass saw, whatever stands in its place now.

        Raises:
            RuntimeError: If it was changed in place since, so that there is no right gradient.
        """
        if self.tensor._version != version:
            owner, name = self.places[0]
            raise RuntimeError(
                f"The weight {type(owner).__name__}.{name} of shape {list(self.tensor.shape)} was changed in place between"
                f" the forward and the backward pass of a tiled module (version {version}, now {self.tensor._version}):"
                " step the optimizer after the backward pass."
            )
        return self.tensor


def trainable_weights(work: Work) -> list[Weight]:
    """The tensors of the work's modules that want a gradient, each once.

    Views of a parameter in plain attributes count too: FSDP with ``use_orig_params=False`` keeps its views of the flat
    weights there. Other attributes are what the module computed itself.
    """
    found: dict[int, Weight] = {}
    for owner in work.parts():
        attributes = (
            (n, v) for n, v in owner.__dict__.items() if isinstance(v, Tensor) and isinstance(v._base, nn.Parameter)
        )
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items(), *attributes]:
            if tensor is not None and tensor.requires_grad:
                places = found.setdefault(id(tensor), Weight(tensor)).places
                if (owner, name) not in places:
                    places.append((owner, name))
    return list(found.values())


@contextmanager
def substituted(weights: Sequence[Weight], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let the module see ``tensors`` in place of its weights."""
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (holder, name, tensor)
        for w, tensor in zip(weights, tensors, strict=True)
        for owner, name in w.places
        for holder in (
            cast("dict[str, Any]", owner._parameters),
            cast("dict[str, Any]", owner._buffers),
            owner.__dict__,
        )
        if name in holder  # in two of them under FSDP with use_orig_params=True
    ]
    before = [holder[name] for holder, name, _ in slots]
    try:
        for holder, name, tensor in slots:
            holder[name] = tensor
        yield
    finally:
        for (holder, name, _), tensor in reversed(list(zip(slots, before, strict=True))):
            holder[name] = tensor


class GradientSum:
    """Sums one tensor's gradients over the tiles while autograd produces them, so that only the sum and
    one tile's are alive.

    The leaf's hook adds the tile's gradient to the sum and hands autograd a stand-in of no size. Sums of 16-bit
    gradients are kept in float32 and rounded once: summed in their own dtype their error grows with the number of
    tiles.
    """

    def __init__(self, tensor: Tensor, accumulate: str) -> None:
        self.dtype = tensor.dtype
        wide = accumulate == "float32" and tensor.dtype in (torch.bfloat16, torch.float16)
        self.sum_dtype = torch.float32 if wide else tensor.dtype
        self.sum: Tensor | None = None
        self.leaf = tensor.detach().requires_grad_()
        self._nothing = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(self.leaf)
        self._handle = self.leaf.register_hook(self._take_over)

    def add(self, gradient: Tensor) -> None:
        """Add one tile's gradient."""
        if self.sum is None:
            self.sum = gradient.to(self.sum_dtype, memory_format=torch.contiguous_format, copy=True)
        else:
            self.sum.add_(gradient)

    def _take_over(self, gradient: Tensor) -> Tensor:
        self.add(gradient)
        return self._nothing

    def take(self, zeros: bool = False) -> Tensor | None:
        """The sum in the tensor's own dtype; if no tile used the tensor, ``None``, or zeros where they are asked
        for.
        """
        total, self.sum = self.sum, None
        if total is None:
            return torch.zeros_like(self.leaf, requires_grad=False) if zeros else None
        return total.to(self.dtype)

    def close(self) -> None:
        """Part the leaf from this object: together they keep each other alive."""
        self._handle.remove()


@contextmanager
def gradient_sums(tensors: Sequence[Tensor], accumulate: str) -> Iterator[list[GradientSum]]:
    """A sum for each tensor, parted from its leaf at the end."""
    sums = [GradientSum(tensor, accumulate) for tensor in tensors]
    try:
        yield sums
    finally:
        for s in sums:
            s.close()
