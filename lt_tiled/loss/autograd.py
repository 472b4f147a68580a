"""A loss in tiles, for any head that gives logits: gradients are formed in the forward and scaled in the backward.

The weights are inputs of the autograd Function and their gradients are returned, as a tiled module's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.policies import Tiling
from lt_tiled.tiling.layout import MIN_TILE_TOKENS, Bounds, tile_bounds
from lt_tiled.tiling.recompute import AutocastState, RandomState, SavedCounter, random_state_kept
from lt_tiled.tiling.weights import gradient_sums

Reduction = Literal["mean", "sum", "none"]
Head = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Logits ``[t, V]`` of hidden states ``[t, H]``, with these weights."""
Count = Tensor | float | Literal["global"] | None

TILE_LOGITS = 2**28
"""Entries of one tile of logits under ``num_shards="auto"``: 1 GiB in float32."""


def loss_bounds(num_shards: int | Literal["auto"], tokens: int, vocabulary: int) -> list[Bounds]:
    """Cut the tokens of a loss; ``"auto"`` by the size of a tile's logits."""
    if num_shards != "auto":
        return tile_bounds(Tiling(num_shards), tokens, 1)
    return tile_bounds(Tiling(tile_tokens=max(MIN_TILE_TOKENS, TILE_LOGITS // max(vocabulary, 1))), tokens, 1)


@dataclass(frozen=True)
class LossTiles:
    """How a loss is computed in tiles, for any head that gives logits.

    Raises:
        ValueError: If a value is out of bounds.
    """

    kind: CrossEntropy
    reduction: Reduction = "mean"
    num_shards: int | Literal["auto"] = "auto"
    accumulate: Literal["float32", "param"] = "float32"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={self.reduction!r} must be 'mean', 'sum' or 'none'.")
        Tiling(self.num_shards, accumulate=self.accumulate)

    def loss(
        self,
        head: Head,
        hidden: Tensor,
        labels: Tensor,
        weights: Sequence[Tensor],
        vocabulary: int,
        count: Count = None,
    ) -> Tensor:
        """The loss of a head.

        Args:
            head: Gives logits ``[t, V]`` for hidden states ``[t, H]`` and its weights.
            hidden: ``[..., H]``.
            labels: ``[...]``.
            weights: What the head is called with, and gets gradients for.
            vocabulary: ``V``.
            count: See :func:`~lt_tiled.tiled_linear_cross_entropy`.
        """
        if count is not None and self.reduction != "mean":
            raise ValueError(
                f"count={count!r} divides a mean, and reduction is {self.reduction!r}: set it to 'mean' or leave count out."
            )
        number = count.numel() == 1 if isinstance(count, Tensor) else isinstance(count, int | float) and count >= 0
        if count is not None and not number and (isinstance(count, Tensor) or count != "global"):
            raise ValueError(
                f"count={count!r} must be a number of at least 0, 'global', or None for the labels that count here."
            )
        flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
        bounds = loss_bounds(self.num_shards, len(flat_labels), vocabulary)
        divisor = self._count(flat_labels, count) if self.reduction == "mean" else torch.ones((), device=labels.device)
        divisor = divisor.to(_wide(hidden))
        call = _LossCall(
            self, head, bounds, flat_labels, divisor, AutocastState.now(hidden.device), torch.is_grad_enabled()
        )
        loss: Tensor = _TiledLoss.apply(call, flat, *weights)
        return loss.view(labels.shape) if self.reduction == "none" else loss

    def _count(self, labels: Tensor, count: Count) -> Tensor:
        if count is None or isinstance(count, str):
            counted = self.kind.counted(labels).sum().to(torch.float32)
            if count == "global" and dist.is_available() and dist.is_initialized():
                dist.all_reduce(counted)
                counted /= dist.get_world_size()
            return counted
        return torch.as_tensor(count, dtype=torch.float64, device=labels.device).detach().view(())


@dataclass
class _LossCall:
    """What the forward and the backward of one loss share."""

    tiles: LossTiles
    head: Head
    bounds: list[Bounds]
    labels: Tensor
    divisor: Tensor
    autocast: AutocastState
    grad: bool
    random: RandomState | None = None
    """Before the forward, for a second one."""

    def scale(self, hidden: Tensor) -> Tensor | None:
        """What float16 gradients are multiplied by until the backward: sums would leave its range, and means fall below
        it.
        """
        dtype = self.autocast.dtype or hidden.dtype
        return _HALF_SCALE / self.tiles.kind.counted(self.labels).sum().clamp(min=1) if dtype == torch.float16 else None

    def run(
        self, hidden: Tensor, weights: Sequence[Tensor], wants: Sequence[bool], incoming: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """All tiles: the losses, or their sum, and the gradients of the hidden states and of the weights, of those that
        are wanted.

        Args:
            hidden: ``[T, H]``.
            weights: The head's.
            wants: Of the hidden states and of each weight.
            incoming: The gradient of each token's loss.
        """
        differentiate = any(wants)
        wide = _wide(hidden)
        per_token = self.tiles.reduction == "none"
        losses = hidden.new_zeros(len(self.labels) if per_token else (), dtype=wide)
        slope = torch.zeros_like(hidden) if wants[0] else None
        learn = [w for w, wanted in zip(weights, wants[1:], strict=True) if wanted]
        with gradient_sums(learn, self.tiles.accumulate) as sums:
            targets = [s.leaf for s in sums]
            own = iter(targets)
            leaves = [next(own) if wanted else w.detach() for w, wanted in zip(weights, wants[1:], strict=True)]
            for low, high in self.bounds:
                rows = hidden[low:high].detach().requires_grad_(wants[0])
                inputs = [*([rows] if wants[0] else []), *targets] if differentiate else []
                loss, parts = self._tile(
                    rows, leaves, self.labels[low:high], inputs, None if incoming is None else incoming[low:high, None]
                )
                if per_token:
                    losses[low:high] = loss
                else:
                    losses += loss.sum()
                if slope is not None and parts[0] is not None:
                    slope[low:high] = parts[0]
                del parts
        if self.autocast.dtype is not None:
            torch.clear_autocast_cache()  # which holds casts of the leaves, which have no other use
        totals = iter([torch.zeros_like(w) if s.sum is None else s.sum for w, s in zip(learn, sums, strict=True)])
        found = [next(totals) if wanted else None for wanted in wants[1:]]
        return losses, [slope, *found]

    def _tile(
        self, rows: Tensor, leaves: Sequence[Tensor], labels: Tensor, inputs: Sequence[Tensor], incoming: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """One tile: the loss of each token, and the gradients of the inputs; its logits are gone when this returns."""
        with torch.set_grad_enabled(bool(inputs)), SavedCounter():
            logits = self.head(rows.view_as(rows), leaves)
        values, wide = logits.detach(), _wide(logits)
        values = (
            values if values.dtype == wide and self.head is linear else values.to(wide, copy=True)
        )  # a head may save its output
        loss, gradient = self.tiles.kind.of(values, labels, bool(inputs))
        if gradient is None:
            return loss, ()
        if incoming is not None:
            gradient.mul_(incoming)
        return loss, torch.autograd.grad(logits, inputs, gradient.to(logits.dtype), allow_unused=True)


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _LossCall, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.call, ctx.wants = call, [call.grad and wanted for wanted in ctx.needs_input_grad[1:]]
        if call.tiles.reduction == "none":
            ctx.save_for_backward(hidden, *weights)
            call.random = RandomState.now(hidden.device) if any(ctx.wants) else None
            return call.run(hidden, weights, [False] * len(ctx.wants))[0]
        scale = call.scale(hidden)
        loss, gradients = call.run(
            hidden, weights, ctx.wants, None if scale is None else scale.expand(len(call.labels))
        )
        ctx.dtypes = [t.dtype for t in (hidden, *weights)]
        # No label counts: the loss is nan, and the gradients are zeros, as untiled.
        factor = 1 / call.divisor.where(call.divisor != 0, 1.0) / (1.0 if scale is None else scale)
        # Sums of 16-bit weights in float32 are rounded now, to half their memory, where the dtype's range is wide
        # enough.
        done = [
            g is not None and g.dtype != dtype == torch.bfloat16 for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        ctx.factors = [torch.ones_like(factor) if d else factor for d in done]
        ctx.save_for_backward(
            *(
                _scaled(g, factor, torch.bfloat16) if d and g is not None else g
                for g, d in zip(gradients, done, strict=True)
            )
        )
        return loss / call.divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        call: _LossCall = ctx.call
        if call.tiles.reduction == "none":
            hidden, *weights = ctx.saved_tensors
            with (
                call.autocast.context(),
                random_state_kept(hidden.device, call.random),
            ):
                gradients = call.run(hidden, weights, ctx.wants, incoming)[1]
            return (
                None,
                *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, (hidden, *weights), strict=True)),
            )
        scaled = (
            None if g is None else _scaled(g, incoming * factor, dtype)
            for g, factor, dtype in zip(ctx.saved_tensors, ctx.factors, ctx.dtypes, strict=True)
        )
        return (None, *scaled)


def _wide(tensor: Tensor) -> torch.dtype:
    """In what losses of it are computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient times a factor, each product rounded once: a factor in 16 bits would be off by itself."""
    if gradient.dtype == dtype and dtype in (torch.float32, torch.float64):
        return gradient * factor.to(dtype)
    result = torch.empty_like(gradient, dtype=dtype)
    if gradient.dim() == 0:
        return result.copy_(gradient.float() * factor)
    for rows, into in zip(gradient.split(_ROWS), result.split(_ROWS), strict=True):
        into.copy_(rows.float() * factor)
    return result


_ROWS = 4096
_HALF_SCALE = 2.0**15
"""As gradient scalers begin with, so that a label's gradient is at most half of what float16 holds."""


def linear(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The head that a weight, and a bias if there is one, are."""
    return F.linear(hidden, *weights)
