"""The tiled loss against ``F.cross_entropy`` of full logits, over all its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lt_tiled import tiled_linear_cross_entropy

pytestmark = [pytest.mark.slow, pytest.mark.self_checks]
WIDTH, VOCAB = 5, 7
OPTIONS = st.fixed_dictionaries(
    {
        "num_shards": st.integers(1, 8),
        "ignore_index": st.sampled_from([-100, 0, 3, 255, -1]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "count": st.sampled_from([None, None, None, 1, 7.5, 1000]),
        "shift": st.booleans(),
        "logit_softcap": st.sampled_from([None, None, 2.0]),
        "logit_scale": st.sampled_from([1.0, 1.0, 0.5, -2.0, 0.0]),
        "z_loss": st.sampled_from([0.0, 0.0, 0.1]),
    }
)


@st.composite
def inputs(draw: Any, ignore_index: int) -> tuple[list[Tensor], Tensor]:
    """Draw hidden states, weight and sometimes bias, and labels, of which some are ignored or of hidden states that are
    not finite.
    """
    lead = draw(st.tuples(st.integers(0, 30)) | st.tuples(st.integers(0, 3), st.integers(0, 12)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    torch.manual_seed(0)
    hidden = torch.randn(*lead, WIDTH, dtype=dtype)
    tokens = hidden.numel() // WIDTH
    labels = torch.tensor(draw(st.lists(st.integers(0, VOCAB), min_size=1, max_size=9)))  # VOCAB stands for no label
    labels = labels.repeat(tokens)[:tokens].view(lead)
    labels = labels.where(labels < VOCAB, ignore_index)
    if draw(st.booleans()):
        chosen = (labels == ignore_index) != draw(st.booleans())
        hidden[chosen] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    if draw(st.booleans()):
        hidden, labels = hidden.movedim(-1, 0).contiguous().movedim(0, -1), labels.t().contiguous().t()
    tensors = [hidden, torch.randn(VOCAB, WIDTH, dtype=dtype), torch.randn(VOCAB, dtype=dtype)]
    tensors = [tensor.requires_grad_(draw(st.booleans())) for tensor in tensors]
    integers = draw(st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]))
    return tensors[: draw(st.integers(2, 3))], labels.to(integers)


def full(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Return the loss from full logits."""
    logits, labels, ignored = (
        F.linear(hidden, weight, bias) * options["logit_scale"],
        labels.long(),
        options["ignore_index"],
    )
    if (cap := options["logit_softcap"]) is not None:
        logits = cap * (logits / cap).tanh()
    if options["shift"] and labels.numel():
        labels = torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], ignored)], -1)
    divided = options["count"] is not None and options["reduction"] == "mean"
    reduction = "sum" if divided else options["reduction"]
    smoothing = options["label_smoothing"]
    logits, flat = logits.reshape(-1, VOCAB), labels.reshape(-1)
    loss = F.cross_entropy(logits, flat, ignore_index=ignored, label_smoothing=smoothing, reduction=reduction)
    if options["z_loss"]:
        counted = flat != ignored
        penalty = (options["z_loss"] * logits.logsumexp(-1).square()).masked_fill(~counted, 0)
        loss = loss + {"mean": penalty.sum() / counted.sum(), "sum": penalty.sum(), "none": penalty}[reduction]
    loss = loss.view(labels.shape) if reduction == "none" else loss
    return loss / options["count"] if divided else loss


def tiled(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    count = options["count"] if options["reduction"] == "mean" else None
    return tiled_linear_cross_entropy(hidden, weight, labels, bias, **{**options, "count": count})


def result(
    function: Any, tensors: list[Tensor], labels: Tensor, factor: float, options: dict[str, Any]
) -> list[Tensor]:
    """Return the loss and its gradients."""
    loss = function(*tensors[:2], labels, *tensors[2:], **options)
    if not loss.requires_grad:
        return [loss]
    weighted = (loss * torch.arange(1, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)).sum() * factor
    return [loss.detach(), *torch.autograd.grad(weighted, [t for t in tensors if t.requires_grad])]


@given(st.data(), OPTIONS, st.sampled_from([1.0, 0.0, -3.0]))
def test_like_cross_entropy(data: Any, options: dict[str, Any], factor: float) -> None:
    """Loss and gradients are those of ``F.cross_entropy``, nan and inf included."""
    tensors, labels = data.draw(inputs(options["ignore_index"]))
    try:
        true = result(full, tensors, labels, factor, options)
    except Exception:
        assume(False)
        raise
    bound = 1e-10 if tensors[0].dtype == torch.float64 else 1e-4
    for found, expected in zip(result(tiled, tensors, labels, factor, options), true, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)
