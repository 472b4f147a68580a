"""The check of batches, and causal masks aligned to the lower right, on a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lt_tiled.sequence_parallel.calls import LowerRight
from lt_tiled.sequence_parallel.same_batch import SameBatch
from tests.sequence_parallel.models import ids
from tests.world import World

pytestmark = pytest.mark.gpu


def late() -> list[str]:
    """What each of three checks says, of which the second has another batch on rank 1, and none waits for the GPU but
    the first.
    """
    same, said = SameBatch("model", dist.group.WORLD), []
    for step in range(3):
        batch = ids(2, 32, seed=dist.get_rank() if step == 1 else 0).cuda()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            same.check([("input_ids", batch)])
            said.append("")
        except ValueError as error:
            said.append(str(error))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return said


def test_values_of_the_last_pass(world: World) -> None:
    """Another batch is found with the next pass, and the GPU is not waited for."""
    for first, second, third in world(late):
        assert (first, second) == ("", "")
        assert "was given a batch on rank 1" in third


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
