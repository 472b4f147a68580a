"""Metrics that are updated tile by tile, against torchmetrics on full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from lt_tiled.metrics import TiledPerplexity, TiledTokenAccuracy
from tests.meters import peak_bytes
from tests.world import World

VOCAB, H = 41, 8


def batch(seed: int, tokens: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCAB, (2, tokens), generator=generator)
    labels[0, : 5 + seed] = -100
    weight, bias = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(99)) for shape in ((VOCAB, H), (VOCAB,))
    )
    return torch.randn(2, tokens, H, generator=generator), weight, labels, bias


def measured() -> list[tuple[float, float]]:
    """Over two batches of this rank; torchmetrics gets the full logits."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: list[tuple[float, float]] = []
    for top_k in (None, 1, 5):
        tiled: Any = TiledTokenAccuracy(top_k=top_k, num_shards=4) if top_k else TiledPerplexity(num_shards=4)
        whole: Any = Perplexity(ignore_index=-100)
        if top_k:
            whole = MulticlassAccuracy(VOCAB, top_k, "micro", ignore_index=-100)
        for seed in (2 * rank, 2 * rank + 1):
            hidden, weight, labels, bias = batch(seed, 30 + rank)
            logits = F.linear(hidden, weight, bias)
            tiled.update(hidden, weight, labels, bias)
            whole.update(*((logits.flatten(0, 1), labels.flatten()) if top_k else (logits, labels)))
        found.append((float(tiled.compute()), float(whole.compute())))
    return found


def test_equal_to_torchmetrics(world: World) -> None:
    """Perplexity and top-k accuracy over two batches with ignored labels are torchmetrics' own of the full logits, on
    one process and over two ranks with batches of their own.
    """
    first, second = world(measured)
    assert first == second
    for tiled, whole in (*first, *measured()):
        assert tiled == pytest.approx(whole, rel=1e-5)


def test_shift_and_reset() -> None:
    """``shift=True`` compares each token with the next label; ``reset`` begins anew."""
    hidden, weight, labels, bias = batch(0)
    logits = F.linear(hidden, weight, bias)
    metric, whole = TiledPerplexity(num_shards=3, shift=True), Perplexity(ignore_index=-100)
    metric.update(hidden * 2, weight, labels)
    metric.reset()
    metric.update(hidden, weight, labels, bias)
    whole.update(logits[:, :-1], labels[:, 1:])
    assert float(metric.compute()) == pytest.approx(float(whole.compute()), rel=1e-5)


def test_no_full_logits() -> None:
    """The peak of an update is one tile's logits, a fraction of the full logits."""
    vocab = 2**17
    hidden, weight, labels = torch.randn(1, 256, H), torch.randn(vocab, H), torch.zeros(1, 256, dtype=torch.long)
    for metric in (TiledPerplexity(num_shards=4), TiledTokenAccuracy(num_shards=4)):
        assert peak_bytes(lambda m=metric: m.update(hidden, weight, labels)) <= 4 * 256 * vocab / 4 * 1.2


def test_ignored_class() -> None:
    """Where the label to ignore is a class, its tokens neither count nor hit."""
    metric = TiledTokenAccuracy(ignore_index=0, num_shards=2)
    metric.update(torch.eye(4), torch.eye(4), torch.tensor([0, 0, 0, 3]))
    assert float(metric.compute()) == 1.0


def test_refused() -> None:
    """A batch whose shapes do not fit is refused, and counts for nothing. So is a ``top_k`` that is no number."""
    hidden, weight, labels, _ = batch(0)
    for metric in (TiledPerplexity(), TiledTokenAccuracy()):
        with pytest.raises(ValueError, match="labels and bias have the shapes"):
            metric.update(hidden, weight, labels[:, 1:])
        assert int(metric.count) == 0
    for value in (0, 1.5):
        with pytest.raises(ValueError, match=f"top_k={value} must be an integer of at least 1"):
            TiledTokenAccuracy(top_k=value)  # type: ignore[arg-type]


@pytest.mark.low_precision
def test_sums_in_float32() -> None:
    """A perplexity that is made under Lightning's ``bf16-true``, where bfloat16 is the default dtype, counts in
    float32.
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        metric = TiledPerplexity()
    finally:
        torch.set_default_dtype(torch.float32)
    assert metric.total.dtype == torch.float32
