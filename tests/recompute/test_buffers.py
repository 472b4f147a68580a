"""Blocks that change buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing, prepare
from tests.models import H
from tests.parity import randn


class Buffered(nn.Module):
    """A block of two projections, which changes a buffer between what the backward pass saves."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)
        self.norm = nn.BatchNorm1d(H)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))
        self.register_buffer("state", torch.ones(H))
        self.register_buffer("later", None)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).sin()
        x = self.change(self, x)
        return self.b(x).sin().exp().sin() * 0.5


def mean(x: Tensor) -> Tensor:
    return x.detach().mean((0, 1))


def in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.mul_(0.9).add_(mean(x))
    return x * m.state.clone()


def replaced(m: Any, x: Tensor) -> Tensor:
    m.state = 0.9 * m.state + mean(x)
    return x * m.state


def filled_later(m: Any, x: Tensor) -> Tensor:
    """Set a buffer that is there after the first forward pass."""
    m.later = mean(x) if m.later is None else m.later.lerp(mean(x), 0.5)
    return x * m.later


def without_a_version(m: Any, x: Tensor) -> Tensor:
    """Change a buffer as batch norm does, without a new version."""
    old = m.state.clone()
    return F.batch_norm(x.flatten(0, 1), m.state, torch.ones(H), training=True).view_as(x) * old


CHANGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch norm": lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2),
    "spectral norm": lambda m, x: m.spectral(x),
    "in place": in_place,
    "replaced": replaced,
    "filled later": filled_later,
    "without a version": without_a_version,
}


def without_and_with(run: Callable[[nn.Sequential], Any], change: Callable[[Any, Tensor], Tensor]) -> list[Any]:
    """Return what blocks give without activation checkpointing, and with."""
    found = []
    for policy in (False, ActivationCheckpointing("Buffered")):
        torch.manual_seed(0)
        model = nn.Sequential(*(Buffered(change) for _ in range(3)))
        with prepare(model, activation_checkpointing=policy, tiling=False):
            found.append(run(model))
    return found


def steps(model: nn.Module) -> dict[str, Tensor]:
    """Train two steps of two forward passes each, with calls in between, and one backward pass kept for another."""
    inputs = [randn(2, 5, H, seed=i).detach() for i in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        first, second = model(inputs[0]), model(inputs[1])
        with torch.no_grad():
            model(inputs[2])
        first.square().sum().backward(retain_graph=True)
        model.eval()
        model(inputs[3])
        model.train()
        first.sum().backward()
        second.square().sum().backward()
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**model.state_dict(), **gradients, "output": second.detach()}


@pytest.mark.parametrize("name", CHANGES)
def test_buffers(name: str) -> None:
    """Blocks that change buffers have bit for bit the gradients and the state without checkpointing."""
    true, found = without_and_with(steps, CHANGES[name])
    assert true.keys() == found.keys()
    assert all(torch.equal(true[key], found[key]) for key in true)


def test_a_buffer_that_an_outer_graph_saved() -> None:
    """A graph outside of the block that saved the buffer has its gradients after the recompute."""

    def run(model: nn.Sequential) -> list[Tensor]:
        x = randn(2, 5, H)
        y = model(x)
        z = y * model[0].state
        return [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (y, z)]

    true, found = without_and_with(run, in_place)
    assert all(map(torch.equal, true, found))


def test_an_exception_in_the_recompute_restores_buffers() -> None:
    """A recompute that is interrupted leaves the buffers as they were."""
    calls = itertools.count()

    def fails(m: Any, x: Tensor) -> Tensor:
        x = replaced(m, x)
        if next(calls):
            raise KeyboardInterrupt
        return x

    model = nn.ModuleList([Buffered(fails)])
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Buffered")):
        y = model[0](randn(2, 5, H))
        state = model[0].state
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        assert model[0].state is state
