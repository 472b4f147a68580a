"""Cross-entropy of a projection, tile by tile: the full logits never exist."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lt_tiled.loss.autograd import Count, linear, tiled_loss
from lt_tiled.loss.cross_entropy import CrossEntropy, Reduction, shifted


def tiled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    num_shards: int | Literal["auto"] = "auto",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    count: Count = None,
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(hidden, weight, bias), labels)`` without the full logits.

    With ``"mean"`` and ``"sum"``, gradients are computed in the forward pass, without extra FLOPs. With ``"none"``, and
    in float16, the logits are recomputed in the backward pass.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, as in ``nn.Linear``.
        labels: Integers of shape ``[...]``.
        bias: ``[V]``.
        num_shards: The number of tiles. With ``"auto"``, a tile has at most ``max(512, H / 2)`` tokens and does not
            raise the peak.
        ignore_index: The label of tokens to ignore. They are left out of the tiles.
        label_smoothing: As in ``torch.nn.functional.cross_entropy``.
        reduction: ``"mean"`` over the labels that are not ignored, ``"sum"``, or ``"none"`` for a loss per token.
        logit_softcap: See :class:`~lt_tiled.loss.cross_entropy.CrossEntropy`, as for the next one.
        z_loss: A penalty on the normalizer.
        shift: Whether token ``t`` predicts label ``t + 1`` along the labels' last dimension, as in causal models.
        count: The divisor of ``"mean"`` instead of the number of labels, such as its mean over all ranks, so that
            averaged gradients weight all labels equally.

    Returns:
        The loss, in float32 for 16-bit logits. It is a scalar, or has the labels' shape with ``"none"``.

    Raises:
        ValueError: If shapes do not fit or a value is out of bounds.
    """
    check_shapes(hidden, weight, labels, bias)
    kind = CrossEntropy(ignore_index, label_smoothing, logit_softcap, z_loss, reduction)
    if shift:
        labels = shifted(labels, ignore_index)
    weights = [weight] if bias is None else [weight, bias]
    loss: Tensor = tiled_loss(linear, hidden, labels, weights, kind, num_shards, count)
    return loss


def tiled_token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the log-probability of each label, ``[...]``, for DPO and other preference losses. Ignored labels get 0.

    The options are those of :func:`tiled_linear_cross_entropy` except ``reduction``, and so are the errors raised.
    """
    return -tiled_linear_cross_entropy(hidden, weight, labels, bias, reduction="none", **options)


def check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Refuse labels that are no integers, and shapes that do not fit together, with a ``ValueError``."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype} and must be integers: probabilities are not supported.")
    fit = labels.shape == hidden.shape[:-1] and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
    fit = fit and (bias is None or bias.shape == weight.shape[:1])
    if not fit:
        shapes = [None if t is None else list(t.shape) for t in (hidden, weight, labels, bias)]
        raise ValueError(
            f"hidden, weight, labels and bias have the shapes {shapes} and must have [..., H], [V, H], [...] and [V]."
        )
