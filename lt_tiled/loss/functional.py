"""Cross-entropy of a projection, tile by tile: the full logits never exist, and none are computed twice."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lt_tiled.loss.autograd import Count, tiled_loss
from lt_tiled.loss.cross_entropy import CrossEntropy, Reduction, shifted
from lt_tiled.loss.products import linear
from lt_tiled.modules.patch import without_compiler


@without_compiler
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
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    shift: bool = False,
    count: Count = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), labels)`` with the logits of one tile of tokens at a time.

    For ``"mean"`` and ``"sum"`` gradients are formed in the forward pass, with as many FLOPs as without tiles. With
    ``"none"`` the logits are recomputed in the backward pass.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, as of ``nn.Linear``.
        labels: Integers of shape ``[...]``.
        bias: ``[V]``.
        num_shards: Tiles; with ``"auto"`` a tile has at most ``max(512, H / 2)`` tokens and does not raise the peak:
            see :func:`~lt_tiled.loss.autograd.loss_bounds`. Tokens whose label does not count are left out.
        ignore_index: The label of tokens that do not count.
        label_smoothing: As of ``torch.nn.functional.cross_entropy``.
        reduction: ``"mean"`` over the labels that count, ``"sum"``, or ``"none"`` for one loss per token.
        logit_softcap: See :class:`~lt_tiled.loss.cross_entropy.CrossEntropy`, as for the next two.
        logit_scale: A factor of the logits.
        z_loss: A penalty on the normalizer.
        shift: Token ``t`` predicts label ``t + 1`` along the labels' last dimension, as in causal models.
        count: For ``"mean"``, what to divide by instead of the labels that count here: a positive number, or
            ``"global"`` for the mean of all ranks' counts, so that the mean of the ranks' gradients is that over all of
            their labels.

    Returns:
        The loss, in float32 for 16-bit logits: a scalar, or with ``"none"`` of the labels' shape.

    Raises:
        ValueError: If shapes do not fit or a value is out of bounds.
    """
    check_shapes(hidden, weight, labels, bias)
    kind = CrossEntropy(ignore_index, label_smoothing, logit_softcap, logit_scale, z_loss, reduction)
    if shift:
        labels = shifted(labels, ignore_index)
    weights = [weight]
    if bias is not None:
        weights.append(bias)
    return tiled_loss(linear, hidden, labels, weights, kind, num_shards, count)


def tiled_token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the log-probability of each label, for DPO and other preference losses: ``[...]``, zero where ignored.

    The options are those of :func:`tiled_linear_cross_entropy` but for the reduction, and so are the errors raised.
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
