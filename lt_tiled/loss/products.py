"""The products of one tile of a loss: its logits, and from their gradient those of hidden states and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lt_tiled.recompute.mode import PlainSavedTensors, Precision
from lt_tiled.tiling.effects import check_leaves
from lt_tiled.tiling.weights import GradientSum

Head = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Gives logits ``[t, V]`` for hidden states ``[t, H]`` and weights."""
Sums = Sequence[GradientSum | None]
"""The sum of each weight's gradients over the tiles; ``None`` for weights that want none."""


def linear(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply a head that is a weight, with a bias if there is one."""
    return F.linear(hidden, *weights)


class LinearTile:
    """Tiles of a head that is a weight, without a graph."""

    def __init__(self, weights: Sequence[Tensor], sums: Sums, wants_rows: bool, autocast: Precision) -> None:
        self._sums, self._wants_rows, self._dtype = sums, wants_rows, autocast.dtype
        self._weight, *self._bias = (self._cast(w.detach()) for w in weights)
        self._rows = self._weight[:0]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None or tensor.dtype == torch.float64 else tensor.to(self._dtype)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits ``[t, V]`` of hidden states ``[t, H]``, which may be overwritten."""
        self._rows = self._cast(rows)
        return F.linear(self._rows, self._weight, *self._bias)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weights' gradients for the last tile's gradient of logits, and return that of its hidden states."""
        weight, *bias = self._sums
        if weight is not None:
            weight.add_product(gradient.t(), self._rows)
        if bias and bias[0] is not None:
            bias[0].add(gradient.sum(0, dtype=bias[0].sum_dtype))
        return gradient.mm(self._weight) if self._wants_rows else None


class GraphTile:
    """Tiles of any other head, by autograd. Sums take each tile's gradient as it arrives."""

    def __init__(self, head: Head, weights: Sequence[Tensor], sums: Sums, wants_rows: bool, name: str) -> None:
        self._head, self._wants_rows, self._name = head, wants_rows, name
        self._leaves = [w.detach() if s is None else s.leaf for w, s in zip(weights, sums, strict=True)]
        self._inputs: list[Tensor] = []
        self._output: Any = None
        self._is_first = True

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits ``[t, V]`` of hidden states ``[t, H]``, which may be overwritten.

        Raises:
            NotPositionWiseError: If the head uses a weight that is not among those given, and would get no gradient.
        """
        rows = rows.detach().requires_grad_(self._wants_rows)
        self._inputs = [tensor for tensor in (rows, *self._leaves) if tensor.requires_grad]
        with torch.set_grad_enabled(bool(self._inputs)), PlainSavedTensors():
            logits = self._head(rows.view_as(rows), self._leaves)
        if logits.requires_grad and self._is_first:
            check_leaves([logits.grad_fn], set(map(id, self._inputs)), self._name)
            self._is_first = False
        # Not the logits themselves, so that their memory is freed before the gradient's is used.
        self._output = torch.autograd.graph.get_gradient_edge(logits) if self._inputs else None
        return logits.detach().clone(memory_format=torch.contiguous_format)  # the head may have saved its output

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weights' gradients for the last tile's gradient of logits, and return that of its hidden states."""
        torch.autograd.backward([self._output], [gradient], inputs=self._inputs)
        self._output = None
        return self._inputs[0].grad if self._wants_rows else None
