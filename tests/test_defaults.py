"""What nobody asked for never stops a run."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.fabric import TiledSingleDeviceStrategy
from tests.meters import flops
from tests.models import GatedMLP, H
from tests.parity import EXACT, gradients, randn, reference, worst

pytestmark = [pytest.mark.self_checks, pytest.mark.usefixtures("float64")]


class Conditioned(GatedMLP):
    """An MLP that takes a condition for each sample, as adaLN and FiLM do."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * (1 + condition[:, None])


class Layer(nn.Module):
    """A block with an MLP."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(H, H), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + (self.mlp(x, x.mean(1)) if isinstance(self.mlp, Conditioned) else self.mlp(x))


class Stack(nn.Sequential):
    """Two blocks."""


@pytest.mark.parametrize("tokens", [8, 64])
def test_what_auto_finds_and_cannot_tile(tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """It stays untiled from the first step on, however short, with one warning that names the module and the reason."""
    torch.manual_seed(0)
    net, x = Stack(Layer(Conditioned()), Layer(Conditioned())), randn(2, tokens, H)
    true = reference(net, x)
    with prepare(net, tiling=Tiling(tile_tokens=16)):
        assert worst(gradients(net, x), true) < EXACT
        warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == 1
        assert "Conditioned" in warnings[0]
        assert "runs untiled" in warnings[0]


def test_a_model_with_nothing_to_tile_trains(caplog: pytest.LogCaptureFixture) -> None:
    """A strategy at its defaults trains a model without blocks and MLPs, with a warning."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=TiledSingleDeviceStrategy())
    model = fabric.setup_module(nn.LSTM(H, H).double())
    output, _ = model(randn(4, 2, H))
    fabric.backward(output.sum())
    assert all(p.grad is not None for p in model.parameters())
    assert caplog.text.count("The model trains without it.") == 2


class Recomputes(Stack):
    """Applies torch's activation checkpointing to its blocks itself: to each, or to both together, as timm's
    ``checkpoint_seq`` does with a segment.
    """

    how = "each"

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "segment":
            output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return output
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


@pytest.mark.parametrize("how", ["each", "reentrant", "segment"])
def test_a_model_that_recomputes_its_blocks(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks are left to it, with one line, and cost the FLOPs of its own checkpointing."""
    torch.manual_seed(0)
    net, x = Recomputes(Layer(GatedMLP()), Layer(GatedMLP())), randn(2, 32, H).requires_grad_()
    net.how = how
    own, true = flops(lambda: net(x).sum().backward()), gradients(net, x)
    with prepare(net, tiling=False, activation_checkpointing=ActivationCheckpointing()):
        assert flops(lambda: net(x).sum().backward()) == own
        assert worst(gradients(net, x), true) < EXACT
    assert caplog.text.count("Layer is left to the activation checkpointing that its model applies itself") == 1
