"""Causal masks aligned to the lower right, on a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lt_tiled.sequence_parallel.calls import LowerRight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_right(dtype: torch.dtype) -> None:
    """Kernels without a mask have the output and the gradients of the mask, as near as their own rounding."""
    found = []
    for kind in (torch.float64, dtype, dtype):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, n, 64, device="cuda").to(kind).requires_grad_() for n in (40, 104, 104))
        mask = LowerRight(40, 104) if len(found) == 2 else torch.ones(40, 104, dtype=torch.bool, device="cuda").tril(64)
        out = F.scaled_dot_product_attention(q, k, v, mask)
        out.square().sum().backward()
        found.append(torch.cat([t.double().flatten() for t in (out, q.grad, k.grad, v.grad)]))
    true, masked, unmasked = found
    assert (unmasked - true).norm() <= 2 * (masked - true).norm()
