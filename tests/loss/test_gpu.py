"""The tiled loss on a device, of which a GPU adds 16-bit products to a float32 sum in its matrix products."""

from __future__ import annotations

import pytest
import torch

from lt_tiled import tiled_linear_cross_entropy
from tests.loss.test_functional import named, untiled
from tests.parity import less_accurate

pytestmark = pytest.mark.parametrize("device", ["second", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.mark.low_precision
@pytest.mark.parametrize("shards", [1, 16])
@pytest.mark.parametrize("ignored", [0, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors(dtype: torch.dtype, ignored: int, shards: int, device: str) -> None:
    """Each gradient is as near to float64 as that of full logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1000, 64, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(1001, 64, generator=generator).div(8).to(device, dtype).requires_grad_()
    labels = torch.randint(1001, (1000,), generator=generator).to(device)
    labels[:ignored] = -100
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    true = torch.autograd.grad(untiled(*exact, labels), exact)
    full = torch.autograd.grad(untiled(hidden, weight, labels), [hidden, weight])
    loss = tiled_linear_cross_entropy(hidden, weight, labels, num_shards=shards)
    tiled = torch.autograd.grad(loss, [hidden, weight])
    assert less_accurate(*map(named, (tiled, full, true)), dtype) == {}


@pytest.mark.low_precision
def test_peak_in_tiles_of_logits(device: str) -> None:
    """The most bytes that a bfloat16 loss allocates are less than two tiles of logits and the weight's gradients."""
    tokens, hidden_size, vocab, shards = (8192, 64, 65536, 8) if device == "cuda" else (512, 16, 2048, 8)
    hidden = torch.randn(tokens, hidden_size, device=device).bfloat16().requires_grad_()
    weight = torch.randn(vocab, hidden_size, device=device).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device)
    tiled_linear_cross_entropy(hidden, weight, labels, num_shards=shards)  # allocates cuBLAS's workspace
    module = torch.get_device_module(device)
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    tiled_linear_cross_entropy(hidden, weight, labels, num_shards=shards).backward()
    tile, gradients = 2 * tokens // shards * vocab, 10 * vocab * hidden_size + 4 * tokens * hidden_size
    assert module.max_memory_allocated() - before <= 2 * tile + gradients
