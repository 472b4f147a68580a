"""The device of ``tests/second_device.py`` finds what a GPU would find, and what a simulation of one easily misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.second_device import NAME

pytestmark = pytest.mark.parametrize("device", [NAME], indirect=True)
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.matmul,
    "in place": lambda a, b: a.add_(b),
    "index of the CPU's": lambda a, b: b[a.long().abs() % 3],
    "loss": lambda a, b: F.cross_entropy(a, b[0].long()),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_mixing_raises(mix: Callable[[Tensor, Tensor], Tensor], device: str) -> None:
    """An operation on tensors of the device and of the CPU raises."""
    with pytest.raises((RuntimeError, IndexError), match=r"same device|should be either on cpu"):
        mix(torch.randn(3, 3, device=device), torch.randn(3, 3))


def test_a_generator_of_its_own(device: str) -> None:
    """The device draws from its own generator, which ``manual_seed`` sets, the CPU's does not move, and torch's own
    activation checkpointing restores.
    """
    torch.manual_seed(3)
    host = torch.get_rng_state()
    drawn = torch.rand(8, device=device)
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(8, device=device).cpu(), drawn.cpu())
    with pytest.raises(RuntimeError, match="Expected a 'second' device type for generator but found 'cpu'"):
        torch.rand(3, device=device, generator=torch.Generator())
    x = torch.ones(64, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad((y := checkpoint(F.dropout, x * 2, use_reentrant=False)).sum(), x)
    assert torch.equal(gradient, y.detach())
