"""The tiled loss against ``F.cross_entropy`` of full logits, over all its arguments."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """One loss. ``bad`` is put into hidden states: of tokens that are ignored, or of all."""

    lead: tuple[int, ...]
    labels: tuple[int, ...]
    dtype: torch.dtype
    integers: torch.dtype
    ignore_index: int
    smoothing: float
    reduction: str
    count: float | None
    shift: bool
    bias: bool
    bad: float | None
    bad_labels: bool
    transposed: bool
    num_shards: int
    wanted: tuple[bool, bool, bool]
    factor: float
    softcap: float | None
    scale: float
    z_loss: float


CASES = st.builds(
    Case,
    lead=st.tuples(st.integers(0, 30)) | st.tuples(st.integers(0, 3), st.integers(0, 12)),
    labels=st.lists(st.integers(0, VOCAB), min_size=1, max_size=9).map(tuple),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    integers=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    ignore_index=st.sampled_from([-100, 0, 3, 255, -1]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    count=st.sampled_from([None, None, None, 1, 7.5, 1000]),
    shift=st.booleans(),
    bias=st.booleans(),
    bad=st.sampled_from([None, None, float("nan"), float("inf"), -float("inf")]),
    bad_labels=st.booleans(),
    transposed=st.booleans(),
    num_shards=st.integers(1, 8),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    factor=st.sampled_from([1.0, 0.0, -3.0]),
    softcap=st.sampled_from([None, None, 2.0]),
    scale=st.sampled_from([1.0, 1.0, 0.5, -2.0, 0.0]),
    z_loss=st.sampled_from([0.0, 0.0, 0.1]),
)


def inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return hidden states, weight and bias, and labels. The number after the last label stands for no label."""
    torch.manual_seed(0)
    hidden = torch.randn(*case.lead, WIDTH, dtype=case.dtype)
    tokens = hidden.numel() // WIDTH
    labels = torch.tensor(case.labels).repeat(tokens)[:tokens].view(case.lead)
    labels = labels.where(labels < VOCAB, case.ignore_index)
    if case.bad is not None:
        chosen = (labels == case.ignore_index) != case.bad_labels
        hidden[chosen] = hidden[chosen].clone().fill_(case.bad)
    if case.transposed:
        hidden, labels = hidden.movedim(-1, 0).contiguous().movedim(0, -1), labels.t().contiguous().t()
    weight, bias = torch.randn(VOCAB, WIDTH, dtype=case.dtype), torch.randn(VOCAB, dtype=case.dtype)
    tensors = [hidden, weight, *([bias] if case.bias else [])]
    return [t.requires_grad_(w) for t, w in zip(tensors, case.wanted, strict=False)], labels.to(case.integers)


def full(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    """Return the loss from full logits."""
    logits, labels = F.linear(hidden, weight, bias) * case.scale, labels.long()
    if case.softcap is not None:
        logits = case.softcap * (logits / case.softcap).tanh()
    if case.shift and labels.numel():
        labels = torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], case.ignore_index)], -1)
    options: dict[str, Any] = {"ignore_index": case.ignore_index, "label_smoothing": case.smoothing}
    divided = case.count is not None and case.reduction == "mean"
    options["reduction"] = "sum" if divided else case.reduction
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), **options)
    if case.z_loss:
        counted = (labels != case.ignore_index).reshape(-1)
        penalty = (case.z_loss * logits.logsumexp(-1).square()).reshape(-1).masked_fill(~counted, 0)
        total = {"mean": penalty.sum() / counted.sum(), "sum": penalty.sum(), "none": penalty}
        loss = loss + total[options["reduction"]]
    loss = loss.view(labels.shape) if case.reduction == "none" else loss
    return loss / case.count if divided else loss


def tiled(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    """Return the tiled loss."""
    return tiled_linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias,
        num_shards=case.num_shards,
        ignore_index=case.ignore_index,
        label_smoothing=case.smoothing,
        reduction=case.reduction,
        count=case.count if case.reduction == "mean" else None,
        shift=case.shift,
        logit_softcap=case.softcap,
        logit_scale=case.scale,
        z_loss=case.z_loss,
    )


def result(case: Case, function: Any) -> list[Tensor]:
    """Return the loss and its gradients."""
    tensors, labels = inputs(case)
    loss = function(tensors[0], tensors[1], labels, tensors[2] if case.bias else None, case)
    if not loss.requires_grad:
        return [loss]
    weighted = (loss * torch.arange(1, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)).sum() * case.factor
    wanted = [t for t in tensors if t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(weighted, wanted)]


@given(CASES)
def test_like_cross_entropy(case: Case) -> None:
    """Loss and gradients are those of ``F.cross_entropy``, nan and inf included."""
    try:
        true = result(case, full)
    except Exception:
        assume(False)
        raise
    bound = 1e-10 if case.dtype == torch.float64 else 1e-4
    for found, expected in zip(result(case, tiled), true, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)
