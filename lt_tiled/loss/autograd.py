"""A loss in tiles: gradients are formed in the forward pass and scaled in the backward pass.

The weights are inputs of the autograd Function and their gradients are returned: see NOTE [Weights are inputs].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.loss.cross_entropy import CrossEntropy, wide_dtype
from lt_tiled.loss.products import GraphTile, Head, LinearTile, linear
from lt_tiled.modules.patch import without_compiler
from lt_tiled.policies import Tiling
from lt_tiled.recompute.compare import TileFingerprints
from lt_tiled.recompute.mode import (
    Precision,
    RandomState,
    hidden_from_checkpoints,
    is_transformed,
    random_state_kept,
)
from lt_tiled.tiling.cut import Bounds, each_tile, tile_bounds
from lt_tiled.tiling.run import is_real
from lt_tiled.tiling.weights import GradientSum

Reduction = Literal["mean", "sum", "none"]
Count = Tensor | float | Literal["global"] | None

MIN_LOSS_TOKENS = 512
"""Fewer rows make the sums of weight gradients, which each tile reads and writes, take longer than the products."""


def loss_bounds(num_shards: int | Literal["auto"], tokens: int, hidden_size: int) -> list[Bounds]:
    """Cut the tokens of a loss, with ``"auto"`` into tiles of at most ``max(512, hidden_size / 2)`` tokens.

    Such tiles do not raise the peak. In 16 bits a tile of ``t`` tokens and at least 2**23 logits holds at most 2 times
    its ``2 t V`` bytes of logits, in whose memory the gradient is formed. When the tiles are done, the float32 sum of
    the weight's gradient, which is alive all the time, is rounded to a copy of ``2 V H`` bytes: more, if ``t`` is at
    most ``H / 2``.
    """
    size = max(MIN_LOSS_TOKENS, hidden_size // 2)
    return tile_bounds(Tiling(tile_tokens=size) if num_shards == "auto" else Tiling(num_shards), tokens, hidden_size=1)


TileTokens = slice | Tensor
"""A tile's tokens: a run of them, or their indices."""


def loss_places(num_shards: int | Literal["auto"], hidden: Tensor, counted: Tensor) -> list[TileTokens]:
    """Return each tile's tokens: those whose label counts, and those with nan or inf, which spoil all gradients.

    Their number is read from the device once. In simulations the tiles have all tokens.
    """
    bounds = loss_bounds(num_shards, *hidden.shape)
    if is_real(hidden) and type(counted) is Tensor:
        sums = hidden.sum(-1, dtype=wide_dtype(hidden))  # nan or inf, if one of them is
        rows = (counted | ~sums.isfinite()).nonzero().squeeze(-1)
        if len(rows) < len(counted):
            size = bounds[0][1] - bounds[0][0]
            return list(rows.tensor_split(max(1, math.ceil(len(rows) / size))))
    return [slice(low, high) for low, high in bounds]


@dataclass(frozen=True)
class LossTiles:
    """How a loss is computed in tiles, for any head that gives logits.

    Raises:
        ValueError: If a value is out of bounds.
    """

    kind: CrossEntropy
    reduction: Reduction = "mean"
    num_shards: int | Literal["auto"] = "auto"
    name: str = "the tiled loss"
    """The name of the head in messages."""

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={self.reduction!r} must be 'mean', 'sum' or 'none'.")
        Tiling(self.num_shards)

    def loss(
        self, head: Head, hidden: Tensor, labels: Tensor, weights: Sequence[Tensor], count: Count = None
    ) -> Tensor:
        """Return the loss of a head with these weights, for hidden states ``[..., H]`` and labels ``[...]``."""
        rows = hidden.reshape(-1, hidden.shape[-1])  # [T, H]
        targets = labels.reshape(-1).long()  # [T]
        divisor = self._divisor(targets, count).to(wide_dtype(hidden))
        if is_transformed():
            losses = self.kind.of(head(rows, weights), targets)
            loss = losses if self.reduction == "none" else losses.sum() / divisor
        else:
            places = loss_places(self.num_shards, rows.detach(), self.kind.counted(targets))
            wants = [torch.is_grad_enabled() and t.requires_grad for t in (rows, *weights)]
            call = _LossCall(self, head, places, targets, divisor, wants, Precision.now(rows.device))
            loss = _TiledLoss.apply(call, rows, *weights)
        return loss.view(labels.shape) if self.reduction == "none" else loss

    def _divisor(self, labels: Tensor, count: Count) -> Tensor:
        if self.reduction != "mean":
            if count is not None:
                raise ValueError(f"count={count!r} divides a mean: leave it out for reduction={self.reduction!r}.")
            return torch.ones((), device=labels.device)
        if count is None or (isinstance(count, str) and count == "global"):
            counted = self.kind.counted(labels).sum().to(torch.float32)
            if count == "global" and dist.is_available() and dist.is_initialized():
                dist.all_reduce(counted)
                counted /= dist.get_world_size()
            return counted
        if isinstance(count, Tensor):
            given = count.detach().to(labels.device, torch.float64).view(())
            return given.where(given != 0, torch.nan)  # else the gradients would be those of the sum
        if not isinstance(count, int | float) or not 0 < count < math.inf:
            raise ValueError(f"count={count!r} must be a positive number, 'global' or None.")
        return torch.full((), count, dtype=torch.float64, device=labels.device)


@dataclass
class _LossCall:
    """What the forward and the backward pass of one loss share."""

    tiles: LossTiles
    head: Head
    places: list[TileTokens]
    labels: Tensor
    divisor: Tensor
    wants: list[bool]
    """Whether the hidden states, and each weight, want a gradient."""
    precision: Precision

    def scales(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each token's gradient is multiplied by before it is rounded, and in the backward pass."""
        # No label counts: the loss is nan, and the gradients are zeros, as untiled.
        divisor = self.divisor.where(self.divisor != 0, 1.0)
        if (self.precision.dtype or hidden.dtype) == torch.float16:  # keeps gradients in range until the backward pass
            most = _HALF_SCALE / self.tiles.kind.counted(self.labels).sum().clamp(min=1) * divisor.clamp(max=2.0**100)
            power = most / (2 * most.frexp().mantissa)  # of two, so that the backward pass rounds nothing
            return power / divisor, 1 / power
        return 1 / divisor, torch.ones_like(divisor)

    def prints(self, hidden: Tensor) -> TileFingerprints | None:
        """Return what takes fingerprints of the logits of one pass, from at most an eighth of a tile's tokens."""
        if not is_real(hidden):
            return None
        return TileFingerprints(self.tiles.name, max(8, len(self.places)), self.precision.dtype)

    def run(
        self, hidden: Tensor, weights: Sequence[Tensor], factors: Tensor | None, prints: TileFingerprints | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Run all tiles; return the loss of each token, ``[T]``, and the gradients that are wanted.

        Args:
            hidden: ``[T, H]``.
            weights: The weights of the head.
            factors: The gradient of each token's loss, ``[T]``; without it there are no gradients.
            prints: Takes the fingerprint of each tile's logits.
        """
        # 1. Memory for the results.
        losses = hidden.new_zeros(len(self.labels), dtype=wide_dtype(hidden))
        wants = [factors is not None and wanted for wanted in self.wants]
        grad_hidden = torch.zeros_like(hidden) if wants[0] else None
        sums = [GradientSum(w, "float32") if wanted else None for w, wanted in zip(weights, wants[1:], strict=True)]
        if factors is not None:
            factors = factors.to(losses.dtype).where(self.tiles.kind.counted(self.labels), 0.0)
        # 2. What computes logits, and their gradients.
        tile: LinearTile | GraphTile = GraphTile(self.head, weights, sums, wants[0], self.tiles.name)
        if self.head is linear and not any(map(is_traceable_wrapper_subclass, (hidden, *weights))):
            tile = LinearTile(weights, sums, wants[0], self.precision)
        for place in each_tile(self.places):
            # 3. The logits of a tile become the gradient of its losses.
            logits = tile.logits(hidden[place])
            if prints is not None:
                prints.take([logits])
            factor = factors[place] if factors is not None and any(wants) else None
            losses[place] = self.tiles.kind.of(logits, self.labels[place], factor).to(losses.dtype)
            # 4. The gradients of weights are added to their sums.
            part = None if factor is None else tile.backward(logits)
            if grad_hidden is not None and part is not None:
                grad_hidden[place] = part.to(grad_hidden.dtype)
            del logits, part
        if self.precision.dtype is not None:
            torch.clear_autocast_cache()  # it holds casts of leaves
        return losses, [grad_hidden, *[None if total is None else total.sum_or_zeros() for total in sums]]


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    @hidden_from_checkpoints()
    def forward(ctx: Any, call: _LossCall, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        ctx.dtypes = [t.dtype for t in (hidden, *weights)]
        if call.tiles.reduction == "none":
            ctx.save_for_backward(hidden, call.labels, *weights)  # which notices changes in place
            ctx.random = RandomState.now(hidden.device)
            ctx.prints = call.prints(hidden)
            return call.run(hidden, weights, None, ctx.prints)[0]
        scale, ctx.factor = call.scales(hidden)
        losses, gradients = call.run(hidden, weights, scale.expand(len(call.labels)))
        # Sums of bfloat16 weights in float32 are rounded now, to half their memory. float16 has not the range.
        for index, (gradient, dtype) in enumerate(zip(gradients, ctx.dtypes, strict=True)):
            if gradient is not None and dtype == torch.bfloat16:
                gradients[index] = gradient.to(dtype)
        ctx.save_for_backward(*gradients)
        return losses.sum() / call.divisor

    @staticmethod
    @without_compiler
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        call: _LossCall = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"A backward pass through a loss in tiles cannot be differentiated (create_graph=True): {_REMEDY}."
            )
        gradients = ctx.saved_tensors
        if call.tiles.reduction == "none":  # the tiles run once more, as in the forward pass
            hidden, _, *weights = gradients
            factor = torch.ones_like(call.divisor)
            prints = call.prints(hidden)
            with call.precision.context(), random_state_kept(hidden.device, ctx.random):
                gradients = call.run(hidden, weights, incoming, prints)[1]
            if prints is not None and ctx.prints is not None:
                ctx.prints.compare(prints, _REMEDY)
        else:
            factor = incoming * ctx.factor
        found: list[Tensor | None] = [None]
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            found.append(None if gradient is None else _scaled(gradient, factor, dtype))
        return tuple(found)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a gradient and round once: a factor in 16 bits would have an error of its own."""
    if gradient.dtype == dtype and dtype in (torch.float32, torch.float64):
        return gradient * factor.to(dtype)
    result = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    for part, into in zip(gradient.flatten().split(_PART), result.view(-1).split(_PART), strict=True):
        into.copy_(part.float() * factor)
    return result


_PART = 2**24
_HALF_SCALE = 2.0**15
"""What gradient scalers begin with: the gradient of a label is then at most half of float16's largest number."""
_REMEDY = "compute it from full logits (loss=False)"
