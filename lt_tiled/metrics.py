"""Metrics of next-token predictions without the full logits: they are updated tile by tile from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from lt_tiled.loss.autograd import loss_places
from lt_tiled.loss.cross_entropy import shifted
from lt_tiled.loss.functional import check_shapes, tiled_token_logprobs
from lt_tiled.policies import check_count


class _TiledMetric(Metric):
    """Sums a value per token and counts tokens, over batches and ranks."""

    full_state_update = False
    dtype_of_total = torch.float32
    _sum: Callable[..., Tensor]
    total: Tensor
    count: Tensor

    def __init__(
        self, ignore_index: int = -100, num_shards: int | Literal["auto"] = "auto", shift: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.num_shards = num_shards
        self.shift = shift
        self.add_state("total", torch.zeros((), dtype=self.dtype_of_total), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> None:
        """Add a batch: hidden states ``[..., H]``, the head's weight ``[V, H]``, labels ``[...]``."""
        check_shapes(hidden, weight, labels, bias)
        if self.shift:
            labels = shifted(labels, self.ignore_index)
        self.total += self._sum(hidden, weight, labels, bias)
        self.count += (labels != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the figure of all tokens that are not ignored."""
        return self.total / self.count


class TiledPerplexity(_TiledMetric):
    """Computes ``torchmetrics.text.Perplexity`` of ``F.linear(hidden, weight, bias)``.

    Args:
        ignore_index: The label of tokens to ignore.
        num_shards: Tiles; ``"auto"`` as for :func:`~lt_tiled.tiled_linear_cross_entropy`.
        shift: Token ``t`` predicts label ``t + 1``, as in causal models.
        kwargs: Arguments of ``torchmetrics.Metric``.
    """

    def _sum(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        return -tiled_token_logprobs(
            hidden, weight, labels, bias, num_shards=self.num_shards, ignore_index=self.ignore_index
        ).sum()

    def compute(self) -> Tensor:
        return super().compute().exp()


class TiledTokenAccuracy(_TiledMetric):
    """Computes the share of tokens whose label is among the ``top_k`` largest logits, over all tokens.

    Args:
        top_k: The number of predictions that count as hits.
        kwargs: Arguments of :class:`TiledPerplexity`.

    Raises:
        ValueError: If ``top_k`` is not a positive integer.
    """

    dtype_of_total = torch.int64

    def __init__(self, top_k: int = 1, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_count("top_k", top_k)
        self.top_k = top_k

    def _sum(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        labels = labels.flatten()
        rows = hidden.flatten(0, -2)
        hits = torch.zeros((), dtype=torch.int64, device=labels.device)
        counted = labels != self.ignore_index
        for place in loss_places(self.num_shards, rows, counted):
            best = F.linear(rows[place], weight, bias).topk(min(self.top_k, len(weight)), -1).indices
            hits += ((best == labels[place, None]).any(-1) & counted[place]).sum()
        return hits
