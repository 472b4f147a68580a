"""Gradients that would be lost: of what a module reads, keeps or differentiates beside its arguments and weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import tile, untile
from lt_tiled.errors import NotPositionWiseError
from tests.models import GatedMLP, H
from tests.parity import EXACT, randn, worst

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.self_checks]


@pytest.mark.parametrize("container", [list, dict])
def test_gradients_inside_containers(container: type) -> None:
    """A tensor in a list or dictionary that wants a gradient, which it would not get, is refused."""

    class Takes(GatedMLP):
        def forward(self, x: Tensor, extra: Any) -> Tensor:
            return super().forward(x) * (extra["scale"] if isinstance(extra, dict) else extra[0])

    m, x, scale = tile(Takes(), num_shards=4), randn(1, 40, H), torch.ones(H)
    extra = {"scale": scale} if container is dict else [scale]
    m(x, extra).sum().backward()
    scale.requires_grad_()
    with pytest.raises(NotPositionWiseError, match=r"depends on a tensor of shape .* neither one of its arguments"):
        m(x, extra).sum().backward()


class Borrowing(nn.Module):
    """Reads a weight that is not registered in it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.own, weight = nn.Linear(H, H), nn.Linear(H, H).weight
        self.borrowed = [weight]
        self.apply_other = {
            "list": lambda x: x @ self.borrowed[0].t(),
            "closure": lambda x: x @ weight.t(),
            "partial": functools.partial(F.linear, weight=weight),
            "computed": lambda x: x @ (2 * weight).t(),
        }[where]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.apply_other(x)


def test_gradients_of_its_own_weights() -> None:
    """A module that computes something else where gradients are on, such as a penalty, is refused by its values."""

    class Penalized(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if not torch.is_grad_enabled():
                return y
            (found,) = torch.autograd.grad(y.square().sum(-1).mean(), self.up.weight, retain_graph=True)
            return y * (1 + found.norm().detach())

    module = tile(Penalized(), num_shards=4, self_check=False)
    with pytest.raises(RuntimeError, match="recompute of Penalized computes other values"):
        module(randn(1, 20, H).requires_grad_()).sum().backward()


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("first", ["none", "no_grad", "frozen"])
@pytest.mark.parametrize("where", ["list", "closure", "partial", "computed"])
def test_a_weight_that_is_not_registered(where: str, first: str, self_check: bool) -> None:
    """A weight that would get no gradient is refused, also if it was frozen, or gradients were off, in a first step."""
    module, x = Borrowing(where), randn(2, 24, H)
    tile(module, num_shards=4, self_check=self_check)
    if first != "none":
        module.borrowed[0].requires_grad_(first != "frozen")
        with torch.set_grad_enabled(first == "frozen"):
            loss = module(x).sum()
        if first == "frozen":
            loss.backward()
        module.borrowed[0].requires_grad_(True)
    with pytest.raises(
        NotPositionWiseError, match=r"Borrowing.* depends on a tensor of shape .* would get no gradient"
    ):
        module(x).sum().backward()


class WithOffset(GatedMLP):
    """Has a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(H)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + self.offset).square()


def test_a_plain_tensor_that_gets_a_graph() -> None:
    """A plain tensor of the module that begins to have a graph is refused in the backward pass."""
    module, x = tile(WithOffset(), num_shards=4), randn(1, 40, H)
    module(x).sum().backward()
    module.offset = torch.ones(H, requires_grad=True) * 2
    y = module(x)
    with pytest.raises(NotPositionWiseError, match="neither one of its arguments nor"):
        y.sum().backward()


def test_a_plain_tensor_that_begins_to_learn() -> None:
    """A plain tensor of the module that begins to want a gradient gets it."""
    module, x, found = WithOffset(), randn(1, 40, H), []
    tile(module, num_shards=4)
    module(x).sum().backward()
    module.offset.requires_grad_()
    for _ in range(2):
        module(x).sum().backward()
        found.append({"offset": module.offset.grad})
        module.offset.grad = None
        untile(module)
    assert worst(*found) < EXACT
