"""The device of ``tests/second_device.py`` finds what a GPU would find, and what a simulation of one easily misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import H, TinyLM, lm_loss
from tests.second_device import NAME

pytestmark = pytest.mark.parametrize("device", [NAME], indirect=True)
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "product": torch.matmul,
    "out=": lambda a, b: torch.mm(a, a, out=b),
    "in place": lambda a, b: a.add_(b),
    "index of the CPU's": lambda a, b: b[a.long().abs() % 3],
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], a[None], a[None], b),
    "loss": lambda a, b: F.cross_entropy(a, b[0].long()),
}


@pytest.mark.parametrize("other", ["cpu", f"{NAME}:1"])
@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_mixing_raises(mix: Callable[[Tensor, Tensor], Tensor], other: str, device: str) -> None:
    """An operation on tensors of the device and of the CPU, or of both indices, raises."""
    with pytest.raises((RuntimeError, IndexError), match=r"same device|should be either on cpu"):
        mix(torch.randn(3, 3, device=device), torch.randn(3, 3, device=other))


def test_generators_of_its_own(device: str) -> None:
    """Each index draws from its own generator, which ``manual_seed`` sets and the CPU's does not move."""
    torch.manual_seed(3)
    host = torch.get_rng_state()
    drawn = [torch.rand(8, device=f"{device}:{index}") for index in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0].cpu(), drawn[2].cpu())
    state = torch.second.get_rng_state(f"{device}:1")  # type: ignore[attr-defined]
    torch.rand(100)
    torch.rand(8, device=device)
    assert torch.equal(torch.second.get_rng_state(f"{device}:1"), state)  # type: ignore[attr-defined]
    torch.manual_seed(3)
    assert torch.equal(
        F.dropout(torch.ones(8, device=device)).cpu(), F.dropout(torch.ones(8, device=f"{device}:1")).cpu()
    )
    with pytest.raises(RuntimeError, match="Expected a 'second' device type for generator but found 'cpu'"):
        torch.rand(3, device=device, generator=torch.Generator())


def test_random_states_that_torch_keeps(device: str) -> None:
    """``fork_rng`` and torch's own activation checkpointing restore the device's generator."""
    x = torch.ones(64, device=device, requires_grad=True)
    with torch.random.fork_rng([0], device_type=device):
        first = torch.rand(3, device=device)
    assert torch.equal(torch.rand(3, device=device), first)
    (gradient,) = torch.autograd.grad((y := checkpoint(F.dropout, x * 2, use_reentrant=False)).sum(), x)
    assert torch.equal(gradient, y.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """Autocast of the device casts its products and not its norms; that of the CPU, and a disabled one, cast nothing.

    Weights get gradients in their own dtype.
    """
    module, x = nn.Linear(H, H, device=device), torch.randn(3, H, device=device)
    with torch.autocast(device, dtype=dtype):
        y = module(x)
        assert y.dtype == (y @ x.t()).dtype == F.scaled_dot_product_attention(*[x[None]] * 3).dtype == dtype
        assert F.layer_norm(y, (H,)).dtype == y.softmax(-1).dtype == torch.float32
        with torch.autocast(device, enabled=False):
            assert module(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert module(x).dtype == torch.float32
    y.sum().backward()
    assert module.weight.grad.dtype == torch.float32
    assert module.weight.grad.device == module.weight.device


def test_bytes_that_are_counted(device: str) -> None:
    """The allocator counts each storage until its last view is gone, and its peak, by index."""
    module: Any = torch.get_device_module(device)
    before = module.memory_allocated(0), module.memory_allocated(1)
    x = torch.ones(1000, device=f"{device}:1")
    view = x[5:]
    del x
    assert (module.memory_allocated(0), module.memory_allocated(1)) == (before[0], before[1] + 4000)
    del view
    assert module.memory_allocated(1) == before[1]
    assert module.max_memory_allocated(1) >= before[1] + 4000
    module.reset_peak_memory_stats(1)
    assert module.max_memory_allocated(1) == before[1]


def test_a_training_step_is_that_of_the_cpu(device: str) -> None:
    """A model trains on the device as on the CPU, in float64 with the same weights but for rounding."""
    trained = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        model, ids = TinyLM().double().to(where), torch.arange(48, device=where).view(2, 24) % 32
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            lm_loss(model(ids), ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: value.cpu() for name, value in model.state_dict().items()})
    assert all(torch.allclose(trained[0][name], trained[1][name], rtol=0, atol=1e-12) for name in trained[0])
