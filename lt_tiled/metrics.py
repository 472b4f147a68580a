"""Metrics of next-token predictions that never hold the logits: torchmetrics classes, updated tile by tile from hidden
states.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from lt_tiled.loss.autograd import loss_bounds
from lt_tiled.loss.cross_entropy import shifted
from lt_tiled.loss.functional import check_shapes, tiled_token_logprobs


class _OfHiddenStates(Metric):
    """Counts tokens over batches and ranks.

    Args:
        ignore_index: The label of tokens that do not count.
        num_shards: Tiles; ``"auto"`` as for :func:`~lt_tiled.tiled_linear_cross_entropy`.
        shift: Token ``t`` predicts label ``t + 1``, as in causal models.
        kwargs: Of ``torchmetrics.Metric``.
    """

    full_state_update = False
    count: Tensor

    def __init__(
        self, ignore_index: int = -100, num_shards: int | Literal["auto"] = "auto", shift: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.num_shards = num_shards
        self.shift = shift
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def _targets(self, labels: Tensor) -> Tensor:
        return shifted(labels, self.ignore_index) if self.shift else labels

    def _count(self, labels: Tensor) -> None:
        self.count += (labels != self.ignore_index).sum()


class TiledPerplexity(_OfHiddenStates):
    """``torchmetrics.text.Perplexity`` of ``F.linear(hidden, weight, bias)``."""

    is_differentiable = False
    higher_is_better = False
    total: Tensor

    def __init__(
        self, ignore_index: int = -100, num_shards: int | Literal["auto"] = "auto", shift: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(ignore_index, num_shards, shift, **kwargs)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> None:
        """Add a batch: hidden states ``[..., H]``, the head's weight ``[V, H]``, labels ``[...]``."""
        labels = self._targets(labels)
        found = tiled_token_logprobs(
            hidden, weight, labels, bias, num_shards=self.num_shards, ignore_index=self.ignore_index
        )
        self.total -= found.sum()
        self._count(labels)

    def compute(self) -> Tensor:
        """The perplexity of all tokens that count."""
        return torch.exp(self.total / self.count)


class TiledTokenAccuracy(_OfHiddenStates):
    """The share of tokens whose label is among the ``top_k`` largest logits: ``torchmetrics``' micro-averaged accuracy.

    Args:
        top_k: How many predictions count as hits.
        ignore_index: The label of tokens that do not count.
        num_shards: Tiles.
        shift: Token ``t`` predicts label ``t + 1``.
        kwargs: Of ``torchmetrics.Metric``.

    Raises:
        ValueError: If ``top_k`` is not a positive whole number.
    """

    is_differentiable = False
    higher_is_better = True
    hits: Tensor

    def __init__(
        self,
        top_k: int = 1,
        ignore_index: int = -100,
        num_shards: int | Literal["auto"] = "auto",
        shift: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(ignore_index, num_shards, shift, **kwargs)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k={top_k!r} must be a whole number of at least 1.")
        self.top_k = top_k
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> None:
        """Add a batch: hidden states ``[..., H]``, the head's weight ``[V, H]``, labels ``[...]``."""
        check_shapes(hidden, weight, labels, bias)
        labels = self._targets(labels).reshape(-1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        for low, high in loss_bounds(self.num_shards, len(labels), len(weight)):
            best = F.linear(rows[low:high], weight, bias).topk(min(self.top_k, len(weight)), -1).indices
            right = (best == labels[low:high, None]).any(-1)
            self.hits += (right & (labels[low:high] != self.ignore_index)).sum()
        self._count(labels)

    def compute(self) -> Tensor:
        """The share of hits among all tokens that count."""
        return self.hits / self.count
