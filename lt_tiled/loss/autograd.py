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
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.loss.cross_entropy import CrossEntropy, wide_dtype
from lt_tiled.loss.products import GraphTile, Head, LinearTile, linear
from lt_tiled.modules.patch import without_compiler
from lt_tiled.policies import Tiling
from lt_tiled.recompute.compare import EPS, VERDICT, Sample, fingerprint
from lt_tiled.recompute.mode import (
    Precision,
    RandomState,
    hidden_from_checkpoints,
    is_transformed,
    random_state_kept,
)
from lt_tiled.tiling.cut import Bounds, each_tile, tile_bounds

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

    Their number is read from the device once. Where it cannot be (simulations, captured and compiled code), the tiles
    have all tokens.
    """
    bounds = loss_bounds(num_shards, *hidden.shape)
    plain = type(hidden) in (Tensor, nn.Parameter) and type(counted) is Tensor and not hidden.is_meta
    capturing = counted.is_cuda and torch.cuda.is_current_stream_capturing()
    if plain and not capturing and not torch.compiler.is_compiling():
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
        vocab_size: int,
        count: Count = None,
    ) -> Tensor:
        """Return the loss of a head with these weights, for hidden states ``[..., H]`` and labels ``[...]``."""
        if count is not None and self.reduction != "mean":
            raise ValueError(
                f"count={count!r} divides a mean, and reduction is {self.reduction!r}: set it to 'mean' or leave"
                " count out."
            )
        if isinstance(count, Tensor):
            known = count.numel() == 1 and not count.requires_grad
        else:
            number = isinstance(count, int | float) and not isinstance(count, bool)
            known = 0 < count < math.inf if number else count in (None, "global")  # type: ignore[operator]
        if not known:
            raise ValueError(
                f"count={count!r} must be a positive number, 'global', or None for the labels that count here; it gets"
                " no gradient."
            )
        flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
        divisor = self._count(flat_labels, count) if self.reduction == "mean" else torch.ones((), device=labels.device)
        divisor = divisor.to(wide_dtype(hidden))
        try:
            loss = self._loss(head, flat, flat_labels, weights, divisor)
        except (IndexError, RuntimeError) as error:  # on a CPU; a GPU stops with an assertion of its own
            self._name_wrong_label(labels, vocab_size, error)
            raise
        return loss.view(labels.shape) if self.reduction == "none" else loss

    def _loss(self, head: Head, hidden: Tensor, labels: Tensor, weights: Sequence[Tensor], divisor: Tensor) -> Tensor:
        """Return the loss of hidden states ``[T, H]``, in tiles unless a transform is around."""
        if is_transformed():
            losses = self.kind.of(head(hidden, weights), labels)
            return losses if self.reduction == "none" else losses.sum() / divisor
        places = loss_places(self.num_shards, hidden.detach(), self.kind.counted(labels))
        wants = [torch.is_grad_enabled() and t.requires_grad for t in (hidden, *weights)]
        call = _LossCall(self, head, places, labels, divisor, Precision.now(hidden.device), wants)
        loss: Tensor = _TiledLoss.apply(call, hidden, *weights)
        return loss

    def _name_wrong_label(self, labels: Tensor, vocab_size: int, error: Exception) -> None:
        if labels.device.type != "cpu":
            return
        wrong = (self.kind.counted(labels) & ((labels < 0) | (labels >= vocab_size))).nonzero().tolist()
        if wrong:
            raise IndexError(
                f"label {int(labels[tuple(wrong[0])])} of token {wrong[0]} is out of range: it must be"
                f" {self.kind.ignore_index} or in [0, {vocab_size})."
            ) from error

    def _count(self, labels: Tensor, count: Count) -> Tensor:
        if count is None or isinstance(count, str):
            counted = self.kind.counted(labels).sum().to(torch.float32)
            if count == "global" and dist.is_available() and dist.is_initialized():
                dist.all_reduce(counted)
                counted /= dist.get_world_size()
            return counted
        given = torch.as_tensor(count, dtype=torch.float64, device=labels.device).detach().clone().view(())
        return given.where(given != 0, torch.nan)  # else the gradients would be those of the sum


@dataclass
class _LossCall:
    """What the forward and the backward pass of one loss share."""

    tiles: LossTiles
    head: Head
    places: list[TileTokens]
    labels: Tensor
    divisor: Tensor
    autocast: Precision
    wants: list[bool]
    """Whether the hidden states, and each weight, want a gradient."""
    random: RandomState | None = None
    """The generators' state before the forward pass, if it drew random numbers."""

    def scales(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each token's gradient is multiplied by before it is rounded, and in the backward pass."""
        # No label counts: the loss is nan, and the gradients are zeros, as untiled.
        divisor = self.divisor.where(self.divisor != 0, 1.0)
        if (self.autocast.dtype or hidden.dtype) == torch.float16:  # keeps gradients in range until the backward pass
            most = _HALF_SCALE / self.tiles.kind.counted(self.labels).sum().clamp(min=1) * divisor.clamp(max=2.0**100)
            power = most / (2 * most.frexp().mantissa)  # of two, so that the backward pass rounds nothing
            return power / divisor, 1 / power
        return 1 / divisor, torch.ones_like(divisor)

    def run(
        self, hidden: Tensor, weights: Sequence[Tensor], wants: Sequence[bool], incoming: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Run all tiles; return the losses, or their sum, and the gradients that are wanted.

        Args:
            hidden: ``[T, H]``.
            weights: The weights of the head.
            wants: Whether the hidden states, and each weight, want a gradient.
            incoming: The gradient of each token's loss.
        """
        per_token = self.tiles.reduction == "none"
        losses = hidden.new_zeros(len(self.labels) if per_token else (), dtype=wide_dtype(hidden))
        grad_hidden = torch.zeros_like(hidden) if wants[0] else None
        plain = self.head is linear and not any(is_traceable_wrapper_subclass(t) for t in (hidden, *weights))
        kind = LinearTile if plain else GraphTile
        tile = kind(self.head, weights, wants, self.tiles.accumulate, self.autocast)
        for place in each_tile(self.places):
            rows, labels = hidden[place], self.labels[place]
            factor = None
            if any(wants) and incoming is not None:
                factor = incoming[place].to(losses.dtype).where(self.tiles.kind.counted(labels), 0.0)
            logits = tile.logits(rows)
            loss = self.tiles.kind.of(logits, labels, factor)
            if per_token:
                losses[place] = loss
            else:
                losses += loss.sum()
            part = None if factor is None else tile.backward(logits)
            if grad_hidden is not None and part is not None:
                grad_hidden[place] = part.to(grad_hidden.dtype)
            del logits, part
        return losses, [grad_hidden, *tile.totals()]


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    @hidden_from_checkpoints()
    def forward(ctx: Any, call: _LossCall, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        start = None if call.head is linear else RandomState.now(hidden.device)
        if call.tiles.reduction == "none":
            ctx.save_for_backward(hidden, call.labels, *weights)  # which notices changes in place
            loss = call.run(hidden, weights, [False] * len(call.wants))[0]
            ctx.print = fingerprint(loss) if type(loss) is Tensor and loss.numel() else None  # none of a fake one
        else:
            scale, ctx.factor = call.scales(hidden)
            loss, gradients = call.run(hidden, weights, call.wants, scale.expand(len(call.labels)))
            loss = loss / call.divisor
            ctx.dtypes = [t.dtype for t in (hidden, *weights)]
            # Sums of bfloat16 weights in float32 are rounded now, to half their memory. float16 has not the range.
            for index, (gradient, dtype) in enumerate(zip(gradients, ctx.dtypes, strict=True)):
                if gradient is not None and dtype == torch.bfloat16:
                    gradients[index] = gradient.to(dtype)
            ctx.save_for_backward(*gradients)
        if start is not None and not start.same_as(RandomState.now(hidden.device)):
            call.random = start
        return loss

    @staticmethod
    @without_compiler
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        call: _LossCall = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A backward pass through a loss in tiles cannot be differentiated (create_graph=True): compute it from"
                " full logits (loss=False)."
            )
        saved = ctx.saved_tensors
        if call.tiles.reduction == "none":
            hidden, _, *weights = saved
            with call.autocast.context(), random_state_kept(hidden.device, call.random):
                losses, gradients = call.run(hidden, weights, call.wants, incoming)
            if ctx.print is not None:
                eps = EPS[call.autocast.dtype or hidden.dtype]
                VERDICT.add(Sample("a tiled loss", "set loss=False", eps, ctx.print, fingerprint(losses)))
            pairs = zip(gradients, (hidden, *weights), strict=True)
            return (None, *(None if g is None else g.to(t.dtype) for g, t in pairs))
        scaled = (
            None if g is None else _scaled(g, incoming * ctx.factor, dtype)
            for g, dtype in zip(saved, ctx.dtypes, strict=True)
        )
        return (None, *scaled)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a gradient and round once: a factor in 16 bits would have an error of its own."""
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
"""What gradient scalers begin with: the gradient of a label is then at most half of float16's largest number."""
