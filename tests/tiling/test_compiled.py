"""Tiles that are compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from lt_tiled import tile
from tests.models import GatedMLP, H, PlainMLP, RoutedMLP
from tests.parity import gradients, randn, reference, spread, worst

pytestmark = pytest.mark.slow


class Graphs:
    """A backend of ``torch.compile`` that counts the graphs it is given."""

    count = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.count += 1
        return lookup_backend("aot_eager")(graph, example)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(length: int) -> Tensor:
    return randn(2, length, H, dtype=torch.float64)


@pytest.mark.table("GatedMLP")
@pytest.mark.parametrize("mlp", [GatedMLP, PlainMLP, RoutedMLP])
def test_gradients(mlp: type[nn.Module]) -> None:
    """Compiled tiles have the untiled loss and gradients, whether or not their code is one graph. Two copies and all
    lengths share the graphs, of which the second length makes others, for any length.
    """
    graphs, module = Graphs(), mlp().double()
    plain = copy.deepcopy(module)
    tile(module, tile_tokens=12, compile={"backend": graphs})
    for net in (module, copy.deepcopy(module)):
        for length in (24, 25, 19, 40):
            x = tokens(length)
            assert worst(gradients(net, x), reference(plain, x)) <= 1e-10
    assert graphs.count <= 8
    assert all(isinstance(weight, nn.Parameter) for weight in module.parameters())


@pytest.mark.full
def test_inductor_with_dropout() -> None:
    """Under inductor, dropout draws the same masks in the compiled recompute: the gradient is the slope of the loss
    with one seed.
    """
    module, x = PlainMLP(dropout=0.3).double(), tokens(25)
    module.act = nn.Sequential(nn.GELU(), nn.Dropout(0.4))
    tile(module, tile_tokens=12, compile=True)

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return spread(module(x))

    torch.manual_seed(0)
    gradient = gradients(module, x)["input 0"]
    direction, eps = randn(*x.shape, seed=3, dtype=torch.float64).detach(), 1e-6
    with torch.no_grad():
        slope = (loss(x + eps * direction) - loss(x - eps * direction)) / (2 * eps)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)
