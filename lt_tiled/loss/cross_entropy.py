"""Cross-entropy of one tile of logits and its derivative, in the memory of the logits themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class CrossEntropy:
    """The options of ``torch.nn.functional.cross_entropy``, with a cap of the logits and a z-loss.

    Raises:
        ValueError: If a value is out of bounds.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_softcap: float | None = None
    """Logits become ``cap * tanh(logits / cap)`` (Gemma 2, arXiv:2408.00118)."""
    z_loss: float = 0.0
    """Adds ``z_loss * logsumexp(logits)**2`` for each token that counts (PaLM, arXiv:2204.02311)."""
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index={self.ignore_index!r} must be an integer.")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing!r} must be between 0 and 1.")
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise ValueError(f"logit_softcap={self.logit_softcap!r} must be positive and finite, or None for no cap.")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss!r} must be finite and at least 0.")
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={self.reduction!r} must be 'mean', 'sum' or 'none'.")

    def counted(self, labels: Tensor) -> Tensor:
        """Return which labels count."""
        return labels != self.ignore_index

    def of(self, logits: Tensor, labels: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return the loss of each token, ``[t]``, for logits ``[t, V]``; zero where a label ``[t]`` does not count.

        With a factor, ``[t]`` in the dtype of the losses and zero there as well, overwrite the logits by the losses'
        gradient times the factor.
        """
        rows, vocab_size = logits.shape
        size = max(rows // PARTS, min(rows // 3, PART_LOGITS // vocab_size), 1)
        factors = repeat(None) if factor is None else factor.split(size)
        parts = zip(logits.split(size), labels.split(size), factors, strict=False)
        return torch.cat([self._part(*part) for part in parts])

    def _part(self, logits: Tensor, labels: Tensor, factor: Tensor | None) -> Tensor:
        wide = wide_dtype(logits)
        smooth = self.label_smoothing
        counted = self.counted(labels)
        chosen = labels.where(counted, 0)[:, None]  # [t, 1]
        # 1. The logits, capped.
        values = logits  # [t, V]
        tanh: Tensor | None = None
        if self.logit_softcap is not None:
            tanh = (values.to(wide) / self.logit_softcap).tanh_()
            values = tanh * self.logit_softcap
        # 2. The losses.
        normalizer = values.to(wide).logsumexp(-1, keepdim=True) if self.z_loss else None  # [t, 1]
        logs = values.log_softmax(-1, dtype=wide)
        del values
        loss = -logs.gather(-1, chosen)
        if smooth:
            loss = (1 - smooth) * loss - smooth * logs.mean(-1, keepdim=True)
        if normalizer is not None:
            loss = loss + self.z_loss * normalizer.square()
        loss = loss.squeeze(-1).where(counted, 0.0)
        if factor is None:
            return loss
        # 3. Their gradient: softmax less the label, and what smoothing, z-loss and cap add.
        gradient = logs.exp_()
        if normalizer is not None:
            gradient.mul_(1 + 2 * self.z_loss * normalizer)
        gradient.scatter_add_(-1, chosen, loss.new_full((), smooth - 1).expand(chosen.shape))
        if smooth:
            gradient.sub_(smooth / gradient.shape[-1])
        if tanh is not None:
            gradient.mul_(tanh.square_().neg_().add_(1))
        # As in torch, nan stays nan where a label does not count.
        torch.mul(gradient, factor[:, None], out=logits)
        return loss


PARTS = 8
PART_LOGITS = 2**20
"""A tile's losses are computed in about 8 parts, or in 3 to 8 of 2**20 logits, which have their own float32 copies."""


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which losses are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return for each token the next one's label, and none for the last: ``[..., S]``."""
    return F.pad(labels[..., 1:].long(), (0, min(1, labels.shape[-1])), value=ignore_index)
