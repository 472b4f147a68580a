"""Norms that ``auto`` tiles apart from MLPs, and the projections of attention that run in their tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import Tiling, prepare
from lt_tiled.modules.patch import get_patches
from lt_tiled.tiling.call import EngineNeeds
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.tiling.pending import Pending as DeferredCall
from tests.models import GatedMLP, H, PythonNorm
from tests.parity import gradients, randn, reference, worst

pytestmark = pytest.mark.self_checks

TILES = Tiling(num_shards=4)
Use = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """``use`` says what it does with its input before the projections, and adds to its output."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.use = use
        self.met: list[bool] = []

    def forward(self, n: Tensor) -> Tensor:
        assert n.shape[-1] == n.size(-1) == H
        assert n.dim() == n.ndim == 3
        self.met.append(isinstance(n, DeferredCall) and n.computed is None)
        added = self.use(n)
        attended = F.scaled_dot_product_attention(self.q(n), self.k(n), self.v(n), is_causal=True)
        return self.o(attended) + added


class Block(nn.Module):
    def __init__(self, use: Use = lambda n: n.new_zeros(()), dim: int = -1) -> None:
        super().__init__()
        self.input_norm, self.attention = PythonNorm(dim), Attention(use)
        self.mlp_norm, self.mlp = PythonNorm(), GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def blocks(*args: object, **kwargs: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*args, **kwargs) for _ in range(2))).double()  # type: ignore[arg-type]


def tokens() -> Tensor:
    return randn(2, 18, H, dtype=torch.float64)


def norms(model: nn.Module) -> list[TiledPatch]:
    return [p for m in model.modules() for p in get_patches(m, TiledPatch) if p.is_lone_norm]


def reshaped(n: Tensor) -> Tensor:
    """Change the shape in place, which a norm's output tells without being computed."""
    n.unsqueeze_(0)
    assert n.shape == (1, 2, 18, H)
    return n.squeeze_(0)


USES: dict[str, Use] = {
    "projections": lambda n: n.new_zeros(()),
    "and itself": lambda n: n,
    "in place": lambda n: n.mul_(2),
    "of another shape": reshaped,
    "detached": lambda n: n.detach() * 3,
    "over tokens": lambda n: n.sum(1, keepdim=True),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("checkpointed", [True, False])
def test_whatever_attention_does_with_the_norms_output(use: Use, checkpointed: bool) -> None:
    """The projections run in the norm's tiles, and any other use gets its output: gradients are the untiled ones."""
    model, x = blocks(use), tokens()
    true = reference(model, x)
    with prepare(model, tiling=TILES, activation_checkpointing=checkpointed):
        assert worst(gradients(model, x), true) <= 1e-10
        assert all(met for block in model for met in block.attention.met[1:])
    assert norms(model) == []


def test_a_norm_over_tokens_stays_untiled() -> None:
    """A norm that nobody named and that mixes tokens runs untiled, and nothing else changes."""
    model, x = blocks(dim=1), tokens()
    true = reference(model, x)
    with prepare(model, tiling=TILES, activation_checkpointing=True) as prepared:
        assert worst(gradients(model, x), true) <= 1e-10
        assert [patch.untiled for patch in norms(model) if patch.is_leader] == [True, True]
        assert [row.tiles for row in prepared.report().tiled] == [4, 4]
        assert prepared.report().norms == ()


def test_a_norm_whose_weights_are_freed_runs_in_tiles_of_its_own() -> None:
    """Under engines that free a module's weights after its call, norms run in tiles by themselves."""
    model, x = blocks(), tokens()
    true = reference(model, x)
    with prepare(model, tiling=TILES, activation_checkpointing=True) as prepared:
        for patch in norms(model):
            patch.needs = EngineNeeds(pending=False)
        assert worst(gradients(model, x), true) <= 1e-10
        assert [row.tiles for row in prepared.report().norms] == [4, 4]
        assert not any(met for block in model for met in block.attention.met)
