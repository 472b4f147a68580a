"""What is not token-wise is refused by name, before it is tiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import Tiling, prepare, tile
from tests.models import Block, GatedMLP, H, PlainMLP, RoutedMLP
from tests.parity import randn


class Mean(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Shift(GatedMLP):
    """RWKV's token shift: each token sees the one before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.nn.functional.pad(x, (0, 0, 1, -1)))


class Positions(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class PerCallLoss(GatedMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.square().mean()


class Load(GatedMLP):
    """Returns how many tokens each of as many experts as a tile has tokens got."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return super().forward(x), {"load": torch.zeros(10) + x.shape[1]}


class Opaque(GatedMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return super().forward(x), object()


@pytest.mark.parametrize("module", [Mean(), Shift(), Positions(), nn.Sequential(Block())])
def test_token_mixing_is_refused(module: nn.Module) -> None:
    """A module whose tokens see each other or their place is refused by name at its first call, with the remedy."""
    tile(module, num_shards=4)
    with pytest.raises(ValueError, match=rf"{type(module).__name__} is not token-wise.*Leave it out of targets"):
        module(randn(1, 40, H))


@pytest.mark.parametrize("self_check", [True, False])
def test_per_call_scalar_is_refused(self_check: bool) -> None:
    """A scalar output per call is refused with its name, its shape and the remedy, with the self-check and without."""
    module = tile(PerCallLoss(), num_shards=4, self_check=self_check)
    with pytest.raises(ValueError, match=r"PerCallLoss: output \[1\] of shape \[\] is not per token.*reductions=\{\"\[1\]\": \"sum\"\}"):
        module(randn(1, 40, H))


def test_per_call_vector_as_long_as_a_tile_is_refused() -> None:
    """A vector per call is refused even where it has as many entries as a tile has tokens."""
    module = tile(Load(), num_shards=4, self_check=False)
    with pytest.raises(ValueError, match=r"Load: output \[1\]\['load'\] of shape \[10\] is not per token"):
        module(randn(1, 40, H))


def test_opaque_output_is_refused() -> None:
    """An output that is no tensor and no tree of them is refused by its type."""
    with pytest.raises(ValueError, match=r"Opaque: output \[1\] is a object"):
        tile(Opaque(), num_shards=4)(randn(1, 40, H))


def test_batch_norm_is_refused_when_it_is_marked() -> None:
    """Batch statistics depend on all tokens in training: refused at once, with the path."""
    module = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H))
    with pytest.raises(ValueError, match=r"Sequential is not token-wise: 1 is a BatchNorm1d"):
        tile(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("module", [GatedMLP(), PlainMLP(dropout=0.5), RoutedMLP(), nn.RMSNorm(H)])
def test_token_wise_modules_pass(module: nn.Module, dtype: torch.dtype) -> None:
    """Token-wise modules pass in every dtype, with dropout on and before a mixture of experts."""
    module = copy.deepcopy(module).to(dtype).train()
    tile(module, num_shards=4)
    module(randn(1, 64, H, dtype=dtype))


def test_the_check_leaves_no_trace() -> None:
    """The check draws no random numbers and puts every submodule back into its own mode."""
    module = PlainMLP(dropout=0.5)
    module.act.eval()
    tile(module, num_shards=4)
    before, modes = torch.get_rng_state(), [m.training for m in module.modules()]
    with torch.random.fork_rng():
        module(randn(1, 40, H))
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in module.modules()] == modes


def test_self_check_off() -> None:
    """``self_check=False`` takes the user's word."""
    tile(Positions(), num_shards=4, self_check=False)(randn(1, 40, H))


def test_prepared_model_names_the_path() -> None:
    """In a model the message names the module by its path."""
    model = nn.ModuleDict({"net": nn.ModuleList([Mean()])})
    with prepare(model, tiling=Tiling(4, targets="net.0")), pytest.raises(ValueError, match=r"net\.0 \(Mean\) is not token-wise"):
        model["net"][0](randn(1, 40, H))
