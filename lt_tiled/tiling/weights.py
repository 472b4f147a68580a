"""The weights of a tiled module, found at each call, because engines swap the tensors behind the names."""

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
                f"The weight {type(owner).__name__}.{name} of shape {list(self.tensor.shape)} was changed in place"
                f" between the forward and the backward pass of a tiled module (version {version}, now"
                f" {self.tensor._version}): step the optimizer after the backward pass."
            )
        return self.tensor


def trainable_weights(work: Work) -> list[Weight]:
    """Return the tensors of the work's modules that want a gradient, each once.

    Views of a parameter in plain attributes count: FSDP with ``use_orig_params=False`` keeps its views of the flat
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
def substituted(weights: Sequence[Weight], leaves: Sequence[GradientSum | Tensor]) -> Iterator[None]:
    """Let the modules see other leaves in place of their weights."""
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (holder, name, leaf.leaf if isinstance(leaf, GradientSum) else leaf)
        for w, leaf in zip(weights, leaves, strict=True)
        for owner, name in w.places
        for holder in cast("list[dict[str, Any]]", [owner._parameters, owner._buffers, owner.__dict__])
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
    """Sums one tensor's gradients over the tiles while autograd produces them.

    The leaf's hook adds a tile's gradient to the sum and hands autograd a stand-in without memory, so that only one
    gradient is alive next to the sum. Sums of 16-bit gradients are kept in float32 and rounded once: summed in their
    own dtype, their error grows with the number of tiles.
    """

    def __init__(self, tensor: Tensor, accumulate: str) -> None:
        self.dtype = tensor.dtype
        wide = accumulate == "float32" and tensor.dtype in (torch.bfloat16, torch.float16)
        self.sum_dtype = torch.float32 if wide else tensor.dtype
        self.sum: Tensor | None = None
        self.leaf = tensor.detach().requires_grad_()
        self._nothing = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(self.leaf)
        self._handle = self.leaf.register_hook(self.add)

    def add(self, gradient: Tensor) -> Tensor:
        """Add one tile's gradient."""
        if self.sum is None:
            self.sum = gradient.to(self.sum_dtype, memory_format=torch.contiguous_format, copy=True)
        else:
            self.sum.add_(gradient)
        return self._nothing

    def take(self, zeros: bool = False) -> Tensor | None:
        """Return the sum in the tensor's own dtype; if no tile used it, ``None``, or zeros where they are wanted."""
        total, self.sum = self.sum, None
        if total is None:
            return torch.zeros_like(self.leaf, requires_grad=False) if zeros else None
        return total.to(self.dtype)

    def close(self) -> None:
        """Remove the hook, which keeps the leaf and this object alive."""
        self._handle.remove()


@contextmanager
def gradient_sums(tensors: Sequence[Tensor], accumulate: str) -> Iterator[list[GradientSum]]:
    """Return a sum for each tensor, closed at the end."""
    sums = [GradientSum(tensor, accumulate) for tensor in tensors]
    try:
        yield sums
    finally:
        for s in sums:
            s.close()
