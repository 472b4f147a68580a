"""The tiled Function on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lt_tiled import tile
from tests.models import GatedMLP, H, PlainMLP
from tests.parity import gradients, randn, worst
from tests.tiling.test_autograd import by_hand

pytestmark = pytest.mark.gpu


def test_dropout_on_a_gpu() -> None:
    """The recompute draws the forward's dropout masks from the device's generator."""
    module = PlainMLP(dropout=0.3).double().cuda()
    x = randn(1, 40, H, dtype=torch.float64).detach().cuda().requires_grad_()
    torch.manual_seed(7)
    true = gradients(module, x, call=lambda x: by_hand(module, x, 10))
    tiled = tile(copy.deepcopy(module), num_shards=4)
    for _ in range(2):
        torch.manual_seed(7)
        assert worst(gradients(tiled, x), true) < 1e-12


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_a_gpu(dtype: torch.dtype) -> None:
    """The recompute runs under the device's autocast: input gradients are those of plain autograd over the same
    tiles.
    """
    module = GatedMLP(64, 192).cuda()
    x = randn(1, 256, 64).detach().cuda().requires_grad_()

    def under_autocast(run):
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=dtype):
                return run(x)

        return call

    true = gradients(module, x, call=under_autocast(lambda x: by_hand(module, x, 64)))
    tiled = tile(copy.deepcopy(module), num_shards=4)
    assert torch.equal(gradients(tiled, x, call=under_autocast(tiled))["input 0"], true["input 0"])
