"""Blocks that change buffers, and what they keep in Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import ActivationCheckpointing, prepare
from tests.models import H
from tests.parity import randn


class Base(nn.Module):
    """A block with two projections. The change comes before, between or after what the backward pass saves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).sin()
        x = self.change(x)
        return self.b(x).sin().exp().sin() * 0.5

    def change(self, x: Tensor) -> Tensor:
        return x


class BatchNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(H)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class SpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(self.a)


class WithBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(H))


class InPlace(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.state.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x * self.state.clone()


class ReadFirst(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        x = x * self.state.clone()
        self.state += x.detach().amax((0, 1))
        self.state[0] = 0.3
        return x + self.state.clone()


class ByData(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        self.state.data.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x * self.state.clone()


class Replaced(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        self.state = 0.9 * self.state + x.detach().mean((0, 1))
        return x * self.state


class Counter(WithBuffer):
    """What is computed depends on a count in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def change(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * 2 if self.count.item() % 2 else x.cos()


class Lazy(Base):
    """The buffer is there after the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", None)

    def change(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = x.detach().mean((0, 1))
        else:
            self.state = self.state.lerp(x.detach().mean((0, 1)), 0.5)
        return x * self.state


class OfAGraph(WithBuffer):
    """The buffer carries a graph from one call to the next."""

    def change(self, x: Tensor) -> Tensor:
        x = x * self.state
        self.state = torch.tanh(self.state + x.mean((0, 1)))
        return x


class OwnBatchNorm(WithBuffer):
    """Batch norm without a module of its own, which changes its buffers without a new version."""

    def change(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        old = self.state.clone()
        y = F.batch_norm(flat, self.state, torch.ones(H), training=True)
        return y.view_as(x) * old


KINDS = [
    BatchNorm,
    SpectralNorm,
    InPlace,
    ReadFirst,
    ByData,
    Replaced,
    Counter,
    Lazy,
    OwnBatchNorm,
]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


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
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {**model.state_dict(), **gradients, "output": second.detach()}


def without_and_with(run: Callable[[nn.Sequential], Any], *blocks: type[nn.Module]) -> list[Any]:
    """What the same blocks give without activation checkpointing, and with."""
    found = []
    for policy in (False, ActivationCheckpointing(blocks[0].__name__)):
        torch.manual_seed(0)
        model = nn.Sequential(*(block() for block in blocks))
        with prepare(model, activation_checkpointing=policy, tiling=False):
            found.append(run(model))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_buffers(kind: type[Base]) -> None:
    """Blocks that change buffers have bit for bit the gradients and the state without checkpointing."""
    assert same(*without_and_with(steps, kind, kind, kind))


def test_a_buffer_with_a_graph() -> None:
    """A buffer that carries a graph gets the gradients without checkpointing."""

    def run(model: nn.Module) -> list[Tensor]:
        x = randn(2, 5, H)
        return list(torch.autograd.grad(model(model(x)).square().sum(), [x, *model.parameters()]))

    assert equal(*without_and_with(run, OfAGraph, OfAGraph))


def test_torch_applies_the_change_twice() -> None:
    """Canary: torch's own checkpoint changes a buffer in the recompute again. If it does not, this module can go."""
    block = InPlace()
    y = checkpoint(block, randn(2, 5, H), use_reentrant=False)
    after = block.state.clone()
    y.sum().backward()
    assert not torch.equal(block.state, after)


def test_a_buffer_that_an_outer_graph_saved() -> None:
    """A graph outside of the block that saved the buffer has its gradients after the recompute."""

    def run(model: nn.Sequential) -> list[Tensor]:
        x = randn(2, 5, H)
        y = model(x)
        z = y * model[0].state
        return [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (y, z)]

    assert equal(*without_and_with(run, InPlace, InPlace))


def test_an_exception_in_the_recompute_restores_buffers() -> None:
    """A recompute that is interrupted leaves the buffers as they were."""

    class Fails(Replaced):
        calls = itertools.count()  # no data to restore

        def change(self, x: Tensor) -> Tensor:
            x = super().change(x)
            if next(self.calls):
                raise KeyboardInterrupt
            return x

    model = nn.ModuleList([Fails()])
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Fails")):
        y = model[0](randn(2, 5, H))
        state = model[0].state
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        assert model[0].state is state


class Large(WithBuffer):
    """Changes a buffer of more than 1 MiB, and returns what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2**19))

    def change(self, x: Tensor) -> Tensor:
        self.table.mul_(2)
        return x * self.table[:H].clone()


def test_large_buffers() -> None:
    """A block that changes a large buffer, which is not restored, is refused in its first step."""
    model = nn.ModuleList([Large()])
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Large")):
        y = model[0](randn(2, 5, H))
        with pytest.raises(RuntimeError, match=r"Large.* computes other values"):
            y.sum().backward()


class Notes(Base):
    """Adds to a list of its own and to one of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor, notes: list[int]) -> Tensor:  # type: ignore[override]
        self.log.append(float(x.sum()))
        notes.append(len(x))
        return super().forward(x)


def test_side_effects_in_python_happen_twice() -> None:
    """As with torch's own checkpoint a recompute adds to lists once more, and the gradients are right."""

    def run(model: nn.Sequential) -> tuple[list[Tensor], int]:
        x, notes = randn(2, 5, H), list[int]()
        gradients = list(torch.autograd.grad(model[0](x, notes).sum(), [x, *model[0].a.parameters()]))
        assert len(notes) == len(model[0].log)
        return gradients, len(notes)

    (true, once), (found, twice) = without_and_with(run, Notes)
    assert equal(true, found)
    assert (once, twice) == (1, 2)
