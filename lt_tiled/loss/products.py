"""The products of one tile of a loss: its logits, and from their gradient those of hidden states and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lt_tiled.recompute.mode import PlainSavedTensors
from lt_tiled.tiling.weights import GradientSum, check_leaves

Head = Callable[[Tensor, Sequence[Tensor]], Tensor]  # gives logits [t, V] for hidden states [t, H] and weights
Sums = Mapping[int, GradientSum]  # of gradients over the tiles, by the places of weights that want one


def linear(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply a head that is a weight, with a bias if there is one."""
    return F.linear(hidden, *weights)


class LinearTile:
    """Tiles of a head that is a weight, without a graph."""

    def __init__(self, weights: Sequence[Tensor], sums: Sums, wants_rows: bool, autocast: torch.dtype | None) -> None:
        self._sums = sums
        self._wants_rows = wants_rows
        self._autocast = autocast
        self._weights = [self._cast(weight.detach()) for weight in weights]
        self._rows = self._weights[0][:0]

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._autocast is None or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(self._autocast)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits ``[t, V]`` of hidden states ``[t, H]``, which may be overwritten."""
        self._rows = self._cast(rows)
        return linear(self._rows, self._weights)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weights' gradients for the last tile's gradient of logits, and return that of its hidden states."""
        if 0 in self._sums:
            self._sums[0].add_product(gradient.t(), self._rows)
        if 1 in self._sums:
            self._sums[1].add(gradient.sum(0, dtype=self._sums[1].sum_dtype))
        return gradient.mm(self._weights[0]) if self._wants_rows else None


class GraphTile:
    """Tiles of any other head, by autograd. Sums take each tile's gradient as it arrives."""

    def __init__(self, head: Head, weights: Sequence[Tensor], sums: Sums, wants_rows: bool, name: str) -> None:
        self._head = head
        self._wants_rows = wants_rows
        self._name = name
        self._leaves = [weight.detach() for weight in weights]
        for index, total in sums.items():
            self._leaves[index] = total.leaf
        self._inputs: list[Tensor] = []
        self._output: Any = None

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits ``[t, V]`` of hidden states ``[t, H]``; refuse a head that uses other weights."""
        # 1. The graph begins at the hidden states and at the leaves of weights.
        rows = rows.detach().requires_grad_(self._wants_rows)
        self._inputs = [tensor for tensor in (rows, *self._leaves) if tensor.requires_grad]
        with torch.set_grad_enabled(bool(self._inputs)), PlainSavedTensors():
            logits = self._head(rows.view_as(rows), self._leaves)
        # 2. It ends at an edge, so that the memory of the logits is freed before that of the gradient is used.
        if logits.requires_grad:
            check_leaves([logits], self._inputs, self._name)
            self._output = torch.autograd.graph.get_gradient_edge(logits)
        return logits.detach().clone(memory_format=torch.contiguous_format)  # the head may have saved its output

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weights' gradients for the last tile's gradient of logits, and return that of its hidden states."""
        torch.autograd.backward([self._output], [gradient], inputs=self._inputs)
        self._output = None
        return self._inputs[0].grad if self._wants_rows else None
