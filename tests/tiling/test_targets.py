"""What can be tiled beside modules that ``auto`` finds: methods, norms and projections, plain torch models."""

from __future__ import annotations

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import Tiling, prepare, tile, untile
from lt_tiled.report import Report
from tests.meters import flops, peak_bytes
from tests.models import Block, H, tiny_llama
from tests.parity import gradients, randn, reference, step_of, worst

pytestmark = pytest.mark.self_checks

IDS = torch.arange(96).view(2, 48) % 32
REST = ["*norm*", "*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"]


class WithMethod(nn.Module):
    """A layer whose feed-forward part is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(H, 48), nn.Linear(48, H)
        self.mix = nn.Linear(H, H)

    def feed_forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) * scale

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).mean(1, keepdim=True)
        return x + self.feed_forward(x, scale=2.0)


def x64(batch: int = 2, length: int = 24) -> Tensor:
    return randn(batch, length, H, dtype=torch.float64)


def paths(model: nn.Module) -> list[str]:
    return [row.path for row in Report.of(model).tiled]


def rows(model: nn.Module) -> bool:
    return all(row.tiles > 1 for row in Report.of(model).tiled)


def test_tile_a_method() -> None:
    """``tile(layer.feed_forward)`` tiles a method in place; ``untile`` leaves nothing behind. Functions are refused."""
    layer, x = WithMethod().double(), x64()
    before, true = set(vars(layer)), reference(layer, x)
    method = tile(layer.feed_forward, num_shards=4)
    assert method == layer.feed_forward
    assert worst(gradients(layer, x), true) <= 1e-10
    assert Report.of(layer).tiled[0].path == "feed_forward"
    assert Report.of(layer).tiled[0].tiles == 4
    untile(layer.feed_forward)
    assert set(vars(layer)) == before
    with pytest.raises(TypeError, match="is a builtin_function_or_method, which cannot be tiled: pass a module or"):
        tile(torch.tanh)


def test_copies_of_methods() -> None:
    """Copies of a tiled method have their own weights, and pickles come back plain."""
    model, x = nn.Sequential(WithMethod(), WithMethod()).double(), x64()
    true = reference(model, x)
    for layer in model:
        tile(layer.feed_forward, num_shards=4)
    assert worst(gradients(model, x), true) <= 1e-10
    clone, plain = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert worst(gradients(clone, x), true) <= 1e-10
    assert rows(clone)
    assert not paths(plain)
    assert worst(gradients(plain, x), true) <= 1e-10


def test_the_rest_of_the_block() -> None:
    """Norms, q/k/v and output projections as targets beside ``auto``: the untiled loss and gradients, at no more
    FLOPs.
    """
    model = tiny_llama().double()

    def run() -> dict[str, Tensor]:
        return step_of(model, {"input_ids": IDS, "labels": IDS})

    with prepare(model, activation_checkpointing=True):
        true, untiled = run(), flops(run)
    with prepare(model, tiling=Tiling(4, targets=["auto", *REST], self_check=False), activation_checkpointing=True):
        assert worst(run(), true) <= 1e-6
        assert len(paths(model)) == 2 * (1 + 2 + 4) + 1
        assert rows(model)
        assert flops(run) == untiled


def test_names_inside_of_what_auto_finds() -> None:
    """A name that lies inside of a feed-forward part is tiled with it, and not once more; a norm that is named is tiled
    by itself.
    """
    model, x = nn.Sequential(Block(), Block()).double(), x64()
    true = reference(model, x)
    with prepare(model, tiling=Tiling(4, targets=["*.gate", "auto", "*.norm2"])):
        assert worst(gradients(model, x), true) <= 1e-10
        assert sorted(paths(model)) == ["0.mlp", "0.norm2", "1.mlp", "1.norm2"]


def test_a_function_as_targets() -> None:
    """``targets`` as a function of path and module chooses; one that chooses nothing is refused."""
    model = nn.Sequential(Block(), Block())
    with prepare(model, tiling=Tiling(4, targets=lambda path, module: path == "1.mlp")):
        assert paths(model) == ["1.mlp"]
    with pytest.raises(ValueError, match="matches no module of Sequential"):
        prepare(model, tiling=Tiling(targets=lambda path, module: False))


@pytest.mark.parametrize("norm_first", [True, False])
def test_plain_transformer_encoder(norm_first: bool) -> None:
    """``nn.TransformerEncoder``: the untiled gradients, a lower peak, and FLOPs 1.00 with the norms first.

    A norm after the residual sum saves its input, which has to be computed again: one product more for each layer.
    """
    layer = nn.TransformerEncoderLayer(H, 2, 96, dropout=0.0, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double(), x64(1, 64)
    true = reference(model, x)

    def run() -> None:
        y = model(x)
        torch.autograd.backward(y, torch.ones_like(y))

    costs = []
    for tiling in (None, Tiling(8, self_check=False)):
        with prepare(model, tiling=tiling, activation_checkpointing=True):
            assert worst(gradients(model, x), true) <= 1e-10
            costs.append((flops(run), peak_bytes(run)))
            assert len(paths(model)) == (0 if tiling is None else 2)
            assert rows(model)
    assert costs[1][0] - costs[0][0] == (0 if norm_first else 2 * (2 * 64 * H * 96))
    assert costs[1][1] < costs[0][1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_replaced_forwards_are_kept(when: str) -> None:
    """A forward that Liger or Hugging Face kernels put on the instance runs in the tiles, those of a copy too, and is
    there after release.
    """
    calls = []

    def kernel(self: Any, x: Tensor) -> Tensor:
        calls.append(x.shape[-2])
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    model = tiny_llama()
    mlp = model.model.layers[0].mlp
    if when == "before":
        mlp.forward = MethodType(kernel, mlp)
    with prepare(model, tiling=Tiling(tile_tokens=24)):
        if when == "after":
            mlp.forward = MethodType(kernel, mlp)
        for each in (model, copy.deepcopy(model)):
            calls.clear()
            each(IDS)
            assert set(calls) == ({48} if when == "after" else {8, 16, 24})
    calls.clear()
    model(IDS)
    assert set(calls) == {48}


@pytest.mark.parametrize("targets", ["auto", "GatedMLP", "*.mlp"])
def test_what_blocks_share(targets: str) -> None:
    """An MLP and a norm of several blocks are tiled once, and released."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([Block(), Block(), Block()]), nn.Linear(H, H)).double()
    blocks: Any = model[0]
    blocks[2].mlp = blocks[0].mlp
    blocks[2].norm2 = blocks[0].norm2
    stack = nn.Sequential(*blocks)
    expected = gradients(stack, x64())
    with prepare(model, tiling=Tiling(4, targets=targets)):
        assert worst(gradients(stack, x64()), expected) < 1e-9
    assert worst(gradients(stack, x64()), expected) == 0
