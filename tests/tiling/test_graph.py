"""Gradients that would be lost: of what a module reads, keeps or differentiates beside its arguments and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import tile, untile
from lt_tiled.errors import NotPositionWiseError
from tests.models import Coded, GatedMLP, H
from tests.parity import EXACT, gradients, randn, worst

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.self_checks]


@pytest.mark.parametrize("container", [list, dict])
def test_gradients_inside_containers(container: type) -> None:
    """A tensor in a list or dictionary that wants a gradient, which it would not get, is refused."""
    module = tile(Coded(lambda m, x, extra: m.mlp(x) * extra[0]), num_shards=4)
    x, scale = randn(1, 40, H), torch.ones(H)
    extra = {0: scale} if container is dict else [scale]
    module(x, extra).sum().backward()
    scale.requires_grad_()
    with pytest.raises(NotPositionWiseError, match=r"depends on a tensor of shape .* not among its arguments"):
        module(x, extra).sum().backward()


OTHERS: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "closure": lambda weight: lambda x: x @ weight.t(),
    "partial": lambda weight: functools.partial(F.linear, weight=weight),
    "computed": lambda weight: lambda x: x @ (2 * weight).t(),
}


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("first", ["none", "no_grad", "frozen"])
@pytest.mark.parametrize("where", OTHERS)
def test_a_weight_that_is_not_registered(where: str, first: str, self_check: bool) -> None:
    """A weight that would get no gradient is refused, also if it was frozen, or gradients were off, in a first step."""
    weight, x = nn.Linear(H, H).weight, randn(2, 24, H)
    other = OTHERS[where](weight)
    module = tile(Coded(lambda m, x: m.mlp(x) + other(x)), num_shards=4, self_check=self_check)
    if first == "no_grad":
        with torch.no_grad():
            module(x)
    if first == "frozen":
        weight.requires_grad_(False)
        module(x).sum().backward()
        weight.requires_grad_(True)
    with pytest.raises(NotPositionWiseError, match=r"Coded.* depends on a tensor of shape .* would get no gradient"):
        module(x).sum().backward()


def test_a_plain_tensor_that_begins_to_learn() -> None:
    """A plain tensor of the module that begins to want a gradient gets it."""
    module, x, found = Coded(lambda m, x: (m.mlp(x) + m.offset).square()), randn(1, 40, H), []
    module.offset = torch.ones(H)
    tile(module, num_shards=4)(x).sum().backward()
    module.offset.requires_grad_()
    for _ in range(2):
        module(x).sum().backward()
        found.append({"offset": module.offset.grad})
        module.offset.grad = None
        untile(module)
    assert worst(*found) < EXACT


def test_tiles_in_tiles() -> None:
    """A module inside of a tiled one may be tiled, too."""
    module, x = nn.Sequential(tile(GatedMLP(), num_shards=2)), randn(1, 40, H)
    true = gradients(module, x)
    assert worst(gradients(tile(module, num_shards=4), x), true) < EXACT
