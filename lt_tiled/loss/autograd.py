"""A loss in tiles: gradients are formed in the forward pass and scaled in the backward pass.

The weights are inputs of the autograd Function and their gradients are returned: see NOTE [Weights are inputs] in
``tiling/run.py``. For losses of single tokens, and in float16, gradients are formed in the backward pass, which
computes the logits once more: only then is the factor known with which they stay in float16's range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.loss.cross_entropy import CrossEntropy, wide_dtype
from lt_tiled.policies import Tiling
from lt_tiled.recompute.compare import VERDICT, Fingerprints
from lt_tiled.recompute.mode import (
    PlainSavedTensors,
    Precision,
    RandomState,
    hidden_from_checkpoints,
    is_real,
    is_transformed,
    random_state_kept,
)
from lt_tiled.tiling.cut import each_tile, tile_sizes
from lt_tiled.tiling.weights import GradientSum, check_leaves

Head = Callable[[Tensor, Sequence[Tensor]], Tensor]  # gives logits [t, V] for hidden states [t, H] and weights
Sums = Mapping[int, GradientSum]  # of gradients over the tiles, by the places of weights that want one
Count = Tensor | float | None

MIN_LOSS_TOKENS = 512
"""Fewer rows make the sums of weight gradients, which each tile reads and writes, take longer than the products."""
_REMEDY = "compute it from full logits (loss=False)"


def loss_sizes(num_shards: int | Literal["auto"], tokens: int, hidden_size: int) -> list[int]:
    """Cut the tokens of a loss, with ``"auto"`` into tiles of at most ``max(512, hidden_size / 2)`` tokens.

    Such tiles do not raise the peak: in 16 bits a tile of ``t`` tokens holds at most ``4 t V`` bytes, and afterwards
    the float32 sum of the weight's gradient is rounded to a copy of ``2 V H`` bytes.
    """
    tiling = Tiling(num_shards)
    if num_shards == "auto":
        tiling = Tiling(tile_tokens=max(MIN_LOSS_TOKENS, hidden_size // 2))
    return tile_sizes(tiling, tokens, hidden_size=1)


def loss_places(num_shards: int | Literal["auto"], hidden: Tensor, counted: Tensor) -> list[Tensor]:
    """Return the indices of each tile's tokens: those whose label counts."""
    sizes = loss_sizes(num_shards, len(hidden), hidden.shape[-1])
    rows = torch.arange(len(hidden), device=hidden.device)
    if is_real(hidden) and type(counted) is Tensor:  # and not in simulations
        rows = counted.nonzero().squeeze(-1)
    size = max(1, sizes[0])
    return list(rows.tensor_split(max(1, math.ceil(len(rows) / size))))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_loss(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor],
    kind: CrossEntropy,
    num_shards: int | Literal["auto"] = "auto",
    count: Count = None,
    name: str = "the tiled loss",
) -> Tensor:
    """Return the loss of a head with these weights, for hidden states ``[..., H]`` and labels ``[...]``."""
    rows = hidden.reshape(-1, hidden.shape[-1])  # [T, H]
    targets = labels.reshape(-1).long()  # [T]
    divisor = _divisor(kind, targets, count).to(wide_dtype(hidden))
    precision = Precision.now(rows.device)
    per_token = is_transformed() or kind.reduction == "none" or (precision.dtype or rows.dtype) == torch.float16
    if is_transformed():
        loss = kind.of(head(rows, weights), targets)
    else:
        places = loss_places(num_shards, rows.detach(), kind.counted(targets))
        of_tiles = replace(kind, reduction="none") if per_token else kind
        call = _LossCall(head, name, of_tiles, places, targets, divisor, torch.is_grad_enabled(), precision)
        loss = _TiledLoss.apply(call, rows, *weights)
    if kind.reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() / divisor if per_token else loss


def _divisor(kind: CrossEntropy, labels: Tensor, count: Count) -> Tensor:
    """Return the divisor of the sum of the losses."""
    if kind.reduction != "mean":
        if count is not None:
            raise ValueError(f"count={count!r} divides a mean: leave it out for reduction={kind.reduction!r}.")
        return torch.ones((), device=labels.device)
    if count is None:
        return kind.counted(labels).sum().to(torch.float32)
    is_number = isinstance(count, int | float) and 0 < count < math.inf
    if not is_number and not isinstance(count, Tensor):
        raise ValueError(f"count={count!r} must be a positive number or None.")
    return torch.as_tensor(count, dtype=torch.float64, device=labels.device).detach().view(())


@dataclass(frozen=True)
class _LossCall:
    """What the forward and the backward pass of one loss share."""

    head: Head
    name: str  # of the head in messages
    kind: CrossEntropy
    places: list[Tensor]
    labels: Tensor
    divisor: Tensor
    with_grad: bool
    precision: Precision

    def run(
        self, tensors: Sequence[Tensor], wanted: Sequence[int], factors: Tensor
    ) -> tuple[Tensor, list[Tensor | None], Fingerprints]:
        """Run all tiles on hidden states ``[T, H]`` and weights, of which those with these indices want a gradient.

        Return the loss of each token, ``[T]``, the gradients for factors of these losses, and fingerprints of the
        logits where the backward pass computes them again.
        """
        hidden = tensors[0]
        weights = tensors[1:]
        # 1. Memory for the results.
        losses = hidden.new_zeros(len(self.labels), dtype=wide_dtype(hidden))
        factors = factors.to(losses.dtype).where(self.kind.counted(self.labels), 0.0)
        gradients: list[Tensor | None] = [None] * len(tensors)
        sums: dict[int, GradientSum] = {}
        for index in wanted:
            if index == 0:
                gradients[0] = torch.zeros_like(hidden)
            else:
                sums[index - 1] = GradientSum(tensors[index], "float32")
        # 2. What computes logits, and their gradients. At most an eighth of a fingerprint is of one tile.
        prints = Fingerprints(self.name, _REMEDY, True, max(8, len(self.places)), self.precision.dtype)
        tile: LinearTile | GraphTile
        if self.head is linear and not any(map(is_traceable_wrapper_subclass, tensors)):
            tile = LinearTile(weights, sums, 0 in wanted, self.precision.dtype)
        else:
            tile = GraphTile(self.head, weights, sums, 0 in wanted, self.name)
        for place in each_tile(self.places):
            # 3. The logits of a tile become the gradient of its losses.
            logits = tile.logits(hidden[place])
            if self.kind.reduction == "none" and is_real(hidden):
                prints.take(0, logits)
            factor = factors[place] if wanted else None
            losses[place] = self.kind.of(logits, self.labels[place], factor).to(losses.dtype)
            # 4. The gradients of weights are added to their sums.
            if wanted:
                part = tile.backward(logits)
                if gradients[0] is not None and part is not None:
                    gradients[0][place] = part.to(hidden.dtype)
                del part
            del logits
        if self.precision.dtype is not None:
            torch.clear_autocast_cache()  # it holds casts of leaves
        for index, total in sums.items():
            gradients[index + 1] = total.take(zeros=True)
        return losses, gradients, prints


class _TiledLoss(torch.autograd.Function):
    """The node of a loss in the graph. It keeps gradients, or for losses of single tokens what computes them."""

    @staticmethod
    @hidden_from_checkpoints()
    def forward(ctx: Any, call: _LossCall, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad and call.with_grad]
        if call.kind.reduction == "none":
            ctx.save_for_backward(call.labels, *tensors)  # which notices changes in place
            ctx.random = RandomState.now(tensors[0].device)
            losses, _, ctx.prints = call.run(tensors, [], call.divisor)
            return losses
        # If no label counts, the loss is nan, and the gradients are zeros, as untiled.
        losses, gradients, _ = call.run(tensors, ctx.wanted, 1 / call.divisor)
        ctx.any_counts = call.kind.counted(call.labels).any()
        ctx.save_for_backward(*gradients)
        return losses.sum() / call.divisor

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"A backward pass through a loss in tiles cannot be differentiated (create_graph=True): {_REMEDY}."
            )
        call: _LossCall = ctx.call
        if call.kind.reduction != "none":
            incoming = incoming.where(ctx.any_counts, 0.0)  # it may be infinite: a sum divided by a count
            return None, *(None if gradient is None else _scaled(gradient, incoming) for gradient in ctx.saved_tensors)
        # The tiles run once more, as in the forward pass.
        tensors = ctx.saved_tensors[1:]
        with call.precision.context(), random_state_kept(incoming.device, ctx.random):
            _, gradients, prints = call.run(tensors, ctx.wanted, incoming)
        VERDICT.add(ctx.prints, prints)
        return None, *gradients


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply a gradient and round once: a factor in 16 bits would have an error of its own."""
    result = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    return torch.mul(gradient, factor.expand(gradient.shape), out=result)  # a scalar would be rounded to its dtype


# The products of one tile: its logits, and from their gradient those of hidden states and weights


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
