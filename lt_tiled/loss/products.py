"""The products of one tile of a loss: its logits, and from their gradient those of hidden states and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lt_tiled.recompute.mode import PlainSavedTensors, Precision
from lt_tiled.tiling.weights import GradientSum, adds_in_product, sum_dtype

Head = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Gives logits ``[t, V]`` for hidden states ``[t, H]`` and weights."""


def linear(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply a head that is a weight, with a bias if there is one."""
    return F.linear(hidden, *weights)


class LinearTile:
    """Tiles of a head that is a weight, without a graph: all tiles' logits are in the same memory.

    Products are added to the sums of weight gradients inside of the matrix product, so none is rounded in between.
    """

    def __init__(
        self, head: Head, weights: Sequence[Tensor], wants: Sequence[bool], accumulate: str, autocast: Precision
    ) -> None:
        self._dtype, self._wants_rows = autocast.dtype, wants[0]
        self._weight, *self._bias = (self._cast(w.detach()) for w in weights)
        self._sums = [
            torch.zeros(w.shape, dtype=sum_dtype(w.dtype, accumulate), device=w.device) if wanted else None
            for w, wanted in zip(weights, wants[1:], strict=True)
        ]
        self._rows = self._buffer = self._weight[:0]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None or tensor.dtype == torch.float64 else tensor.to(self._dtype)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits ``[t, V]`` of hidden states ``[t, H]``, which may be overwritten."""
        self._rows = self._cast(rows)
        if len(self._buffer) < len(rows) or not self._buffer.numel():
            self._buffer = self._rows.new_empty(len(rows), len(self._weight))
        into, transposed = self._buffer[: len(rows)], self._weight.t()
        if self._bias:
            return torch.addmm(self._bias[0], self._rows, transposed, out=into)
        return torch.mm(self._rows, transposed, out=into)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weights' gradients for the last tile's gradient of logits, and return that of its hidden states."""
        weight, *bias = self._sums
        if weight is not None:
            add_product(weight, gradient, self._rows)
        if bias and bias[0] is not None:
            bias[0].add_(gradient.sum(0, dtype=bias[0].dtype))
        return gradient.mm(self._weight) if self._wants_rows else None

    def totals(self) -> list[Tensor | None]:
        """Return the sum of each weight's gradients."""
        return self._sums


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.t() @ right`` to a sum, in the sum's precision."""
    if total.dtype == left.dtype:
        torch.addmm(total, left.t(), right, out=total)
    elif adds_in_product(total, left):
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:  # in parts, because each is copied to the sum's dtype
        right = right.to(total.dtype)
        size = max(1, total.shape[0] // 8)
        for part, into in zip(left.split(size, 1), total.split(size), strict=True):
            torch.addmm(into, part.t().to(total.dtype), right, out=into)


class GraphTile:
    """Tiles of any other head, by autograd. Sums take each tile's gradient as it arrives."""

    def __init__(
        self, head: Head, weights: Sequence[Tensor], wants: Sequence[bool], accumulate: str, autocast: Precision
    ) -> None:
        self._head, self._wants_rows, self._autocast = head, wants[0], autocast
        self._wants = wants[1:]
        self._sums = [GradientSum(w, accumulate) for w, wanted in zip(weights, self._wants, strict=True) if wanted]
        leaves = iter([s.leaf for s in self._sums])
        self._leaves = [next(leaves) if wanted else w.detach() for w, wanted in zip(weights, self._wants, strict=True)]
        self._inputs: list[Tensor] = []
        self._output: Any = None

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits ``[t, V]`` of hidden states ``[t, H]``, which may be overwritten."""
        rows = rows.detach().requires_grad_(self._wants_rows)
        self._inputs = [*([rows] if self._wants_rows else []), *(s.leaf for s in self._sums)]
        with torch.set_grad_enabled(bool(self._inputs)), PlainSavedTensors():
            logits = self._head(rows.view_as(rows), self._leaves)
        # Not the logits themselves, so that their memory is freed before the gradient's is used.
        self._output = torch.autograd.graph.get_gradient_edge(logits) if self._inputs else None
        return logits.detach().clone(memory_format=torch.contiguous_format)  # the head may have saved its output

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weights' gradients for the last tile's gradient of logits, and return that of its hidden states."""
        torch.autograd.backward([self._output], [gradient], inputs=self._inputs)
        self._output = None
        return self._inputs[0].grad if self._wants_rows else None

    def totals(self) -> list[Tensor | None]:
        """Return the sum of each weight's gradients; zeros for a weight that no tile used."""
        if self._autocast.dtype is not None:
            torch.clear_autocast_cache()  # it holds casts of the leaves
        sums = iter([torch.zeros_like(s.leaf) if s.sum is None else s.sum for s in self._sums])
        return [next(sums) if wanted else None for wanted in self._wants]
