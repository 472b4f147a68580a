"""What nobody asked for never stops a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.fabric import TiledSingleDeviceStrategy
from lt_tiled.planner.ledger import Ledger
from tests.models import GatedMLP, H
from tests.parity import EXACT, gradients, randn, reference, worst

pytestmark = [pytest.mark.self_checks, pytest.mark.usefixtures("float64")]


class Mixing(nn.Module):
    """Looks like an MLP, and subtracts the mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - h.mean(1, keepdim=True))


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
@pytest.mark.parametrize("mlp", [Mixing, Conditioned])
def test_what_auto_finds_and_cannot_tile(mlp: type[nn.Module], tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """It stays untiled from the first step on, however short, with one warning that names the module and the reason."""
    torch.manual_seed(0)
    net, x = Stack(Layer(mlp()), Layer(mlp())), randn(2, tokens, H)
    true = reference(net, x)
    with prepare(net, tiling=Tiling(tile_tokens=16)):
        assert worst(gradients(net, x), true) < EXACT
        warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == 1
        assert mlp.__name__ in warnings[0]
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
    """Applies torch's activation checkpointing to its blocks itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def flops(net: nn.Module, x: Tensor) -> int:
    with Ledger() as ledger:
        net(x).sum().backward()
    return ledger.flops


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_recomputes_its_blocks(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks are left to it, with one line, and cost the FLOPs of its own checkpointing."""
    torch.manual_seed(0)
    net, x = Recomputes(Layer(GatedMLP()), Layer(GatedMLP())), randn(2, 32, H).requires_grad_()
    net.reentrant = reentrant
    own, true = flops(net, x), reference(net, x)
    with prepare(net, activation_checkpointing=ActivationCheckpointing()):
        assert flops(net, x) == own
        assert worst(gradients(net, x), true) < EXACT
    assert caplog.text.count("Layer is left to the activation checkpointing that its model applies itself") == 1


class Segmented(Recomputes):
    """Recomputes both blocks together, as timm's ``checkpoint_seq`` does with a segment."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super(Recomputes, self).forward, x, use_reentrant=False)
        return output


def test_a_model_that_recomputes_a_segment() -> None:
    """Blocks in a segment that is recomputed cost what they cost without us."""
    torch.manual_seed(0)
    net, x = Segmented(Layer(GatedMLP()), Layer(GatedMLP())), randn(2, 32, H).requires_grad_()
    own, true = flops(net, x), gradients(net, x)
    with prepare(net, tiling=False, activation_checkpointing=ActivationCheckpointing()):
        assert flops(net, x) == own
        assert worst(gradients(net, x), true) < EXACT


def peak(net: nn.Module, x: Tensor) -> tuple[int, int]:
    """The FLOPs and the peak of live bytes of a later step."""
    net(x).last_hidden_state.square().mean().backward()
    net.zero_grad()
    with Ledger() as ledger:
        net(x).last_hidden_state.square().mean().backward()
    return ledger.flops, ledger.peak


def test_a_model_with_stages_needs_less_than_its_own_checkpointing() -> None:
    """Swin takes fewer FLOPs than with its own activation checkpointing, and less memory with tiles."""
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "image_size": 64, "window_size": 4}
    net, x = SwinModel(SwinConfig(**sizes, hidden_size=32)).train(), randn(1, 3, 64, 64)
    net.gradient_checkpointing_enable()
    flops, memory = peak(net, x)
    net.gradient_checkpointing_disable()
    with prepare(net, tiling=4, activation_checkpointing=True):
        tiled_flops, tiled_memory = peak(net, x)
    assert tiled_flops <= flops
    assert tiled_memory < memory


def _names(net: nn.Module) -> Any:
    from lt_tiled.modules.blocks import find_blocks

    return [type(block).__name__ for _, block in find_blocks(net)]


@pytest.mark.parametrize("kind", ["Swin", "ConvNext", "PvtV2"])
def test_blocks_of_stages(kind: str) -> None:
    """The blocks of a model with stages are the layers in them, also where a stage has one."""
    import transformers

    names = {"Swin": "SwinLayer", "ConvNext": "ConvNextLayer", "PvtV2": "PvtV2BlockLayer"}
    config = getattr(transformers, f"{kind}Config")
    sizes = {"Swin": {"depths": [1, 2, 2]}, "ConvNext": {"depths": [1, 2], "hidden_sizes": [8, 16], "num_stages": 2}}
    with torch.device("meta"):
        net = getattr(transformers, f"{kind}Model")(config(**sizes.get(kind, {})))
    assert set(_names(net)) == {names[kind]}
