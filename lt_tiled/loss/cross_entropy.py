"""Cross-entropy of one tile of logits and its derivative, in the memory of the logits themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """The options of ``torch.nn.functional.cross_entropy``, with a cap and scale of the logits and a z-loss.

    Raises:
        ValueError: If a value is out of bounds.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_softcap: float | None = None
    """Logits become ``cap * tanh(logits / cap)`` (Gemma 2, arXiv:2408.00118)."""
    logit_scale: float = 1.0
    """Logits are multiplied by it, before the cap."""
    z_loss: float = 0.0
    """Adds ``z_loss * logsumexp(logits)**2`` for each token that counts (PaLM, arXiv:2204.02311)."""

    def __post_init__(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index={self.ignore_index!r} must be an integer.")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing!r} must be between 0 and 1.")
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise ValueError(f"logit_softcap={self.logit_softcap!r} must be positive and finite, or None for no cap.")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale={self.logit_scale!r} must be finite.")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss!r} must be finite and at least 0.")

    def counted(self, labels: Tensor) -> Tensor:
        """Return which labels count."""
        return labels != self.ignore_index

    def of(self, logits: Tensor, labels: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token, and its gradient for the logits.

        Args:
            logits: ``[t, V]`` in float32 or float64. Overwritten: the derivative is written in their place.
            labels: ``[t]``.
            differentiate: Whether the derivative is wanted.

        Returns:
            ``[t]``, zero where a label does not count, and ``[t, V]``.
        """
        counted = self.counted(labels)
        chosen = labels.where(counted, 0)[:, None]
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        slope: Tensor | None = None
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_()
            slope = 1 - logits.square() if differentiate else None
            logits.mul_(self.logit_softcap)
        highest = logits.amax(-1, keepdim=True)
        logits.sub_(highest)
        picked = logits.gather(-1, chosen).squeeze(-1)
        mean = logits.mean(-1) if self.label_smoothing else picked
        total = logits.exp_().sum(-1, keepdim=True)
        normaliser = total.log().squeeze(-1)  # less the highest
        whole = normaliser + highest.squeeze(-1)
        smooth = self.label_smoothing  # not by lerp: a logit of -inf, less another, is nan
        loss = normaliser - ((1 - smooth) * picked + smooth * mean if smooth else picked)
        if self.z_loss:
            loss = loss + self.z_loss * whole.square()
        loss = loss.where(counted, 0.0)
        if not differentiate:
            return loss, None
        factor = (1 + 2 * self.z_loss * whole[:, None]) / total
        gradient = logits.mul_(factor)
        gradient.scatter_add_(-1, chosen, gradient.new_full(chosen.shape, self.label_smoothing - 1))
        if self.label_smoothing:
            gradient.sub_(self.label_smoothing / gradient.shape[-1])
        if slope is not None:
            gradient.mul_(slope)
        if self.logit_scale != 1.0:
            gradient.mul_(self.logit_scale)
        return loss, gradient.mul_(counted[:, None])  # as in torch, nan stays nan where a label does not count


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return for each token the next one's label, and none for the last: ``[..., S]``."""
    return F.pad(labels[..., 1:].long(), (0, min(1, labels.shape[-1])), value=ignore_index)
