"""Finding, patching and restoring."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lt_tiled import Tiling, tile, untile
from lt_tiled.modules.targets import find_tileable
from tests.models import Block, GatedMLP, H, RoutedMLP, TinyLM, tiny_llama

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.self_checks]


def found(model: nn.Module, targets: str | list[str] = "auto") -> list[str]:
    return [found.path for found in find_tileable(model, Tiling(targets=targets))]


def test_auto_finds_the_feed_forward_part_of_every_block() -> None:
    """``auto`` finds the MLPs of a Hugging Face model and of a hand-written one, and no attention; and norms that are
    no single kernel, without those that run with an MLP, and with the projections behind them.
    """
    mlps, norms = [f"model.layers.{i}.mlp" for i in range(2)], [f"model.layers.{i}.input_layernorm" for i in range(2)]
    assert found(tiny_llama(), "mlp") == mlps
    assert found(tiny_llama()) == [*mlps, *norms, "model.norm"]
    assert found(TinyLM(3)) == [f"blocks.{i}.mlp" for i in range(3)]
    model = tiny_llama()
    behind = {t.path: t.after for t in find_tileable(model, Tiling())}
    attention = model.model.layers[1].self_attn
    assert behind["model.layers.1.input_layernorm"][:3] == [attention.q_proj, attention.k_proj, attention.v_proj]
    assert behind["model.norm"] == []


def sequential(hidden: int, wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, wide), nn.GELU(), nn.Linear(wide, hidden))


MLPS = ["0.mlp", "1.mlp"]
FINDS: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "a mixture of experts as a whole": (lambda: two_blocks(lambda *_: RoutedMLP()), "auto", MLPS),
    "nn.Sequential(Linear, GELU, Linear)": (lambda: two_blocks(sequential), "auto", MLPS),
    "no attention that is wider than the hidden states": (
        lambda: tiny_llama(head_dim=32),
        "mlp",
        ["model.layers.0.mlp", "model.layers.1.mlp"],
    ),
    "methods of nn.Transformer": (
        lambda: nn.Transformer(H, 2, 1, 1, 48),
        "mlp",
        ["encoder.layers.0._ff_block", "decoder.layers.0._ff_block"],
    ),
    "a class name": (lambda: two_blocks(GatedMLP), "GatedMLP", MLPS),
    "a list of class names": (lambda: two_blocks(GatedMLP), ["GatedMLP"], MLPS),
    "a glob of paths": (lambda: two_blocks(GatedMLP), "*.mlp", MLPS),
    "two paths": (lambda: two_blocks(GatedMLP), MLPS, MLPS),
    "the name of a base class, as of FSDP2's classes": (
        lambda: two_blocks(type("FSDPGatedMLP", (GatedMLP,), {})),
        "GatedMLP",
        MLPS,
    ),
    "a child in torch.compile": (lambda: compiled_child(), "auto", MLPS),
    "only the outermost match": (lambda: two_blocks(GatedMLP), "*mlp*", MLPS),
}


def compiled_child() -> nn.Module:
    blocks = two_blocks(GatedMLP)
    blocks[0].mlp = torch.compile(blocks[0].mlp, backend="eager")
    return blocks


def two_blocks(mlp: Callable[[int, int], nn.Module]) -> nn.Module:
    return nn.ModuleList(Block(mlp=mlp) for _ in range(2))


@pytest.mark.parametrize("name", FINDS)
def test_what_is_found(name: str) -> None:
    """``auto`` finds MLPs of each form, and class names and globs, one or several, name modules."""
    build, targets, paths = FINDS[name]
    assert found(build(), targets) == paths


def test_tile_works_in_place_and_untile_leaves_nothing() -> None:
    """State-dict keys, parameter names, the class and the printed form stay; after ``untile`` the instance is as it
    was.
    """
    module = GatedMLP()
    plain, before = copy.deepcopy(module), dict(module.__dict__)
    assert tile(module, num_shards=2) is module
    with pytest.raises(ValueError, match=r"GatedMLP is tiled already: call lt_tiled.untile"):
        tile(module)
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert type(module) is GatedMLP
    assert repr(module) == repr(plain)
    assert "forward" in module.__dict__
    assert untile(module) is module
    assert module.__dict__ == before
    untile(module)


def test_pickled_module_comes_back_plain() -> None:
    """A pickled module loads as the untiled module, with no state of lt_tiled on it that needs lt_tiled to load."""
    module = tile(GatedMLP(act=nn.functional.gelu), num_shards=4)
    x = torch.randn(1, 20, H)
    data = pickle.dumps(module)
    assert b"lt_tiled.tiling" not in data
    back = pickle.loads(data)
    assert torch.allclose(back(x), untile(module)(x))
    assert "tiled_forward" not in repr(back.forward)


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"num_shards": bad}, rf"num_shards={bad!r} must be 'auto' or an integer") for bad in (0, -1, 2.5, True, "all")),
    *(({"tile_tokens": bad}, rf"tile_tokens={bad!r} must be") for bad in (0, 2.5, True)),
    ({"accumulate": "float16"}, "accumulate='float16' must be one of 'float32', 'param'"),
    ({"num_shards": 4, "tile_tokens": 512}, r"num_shards=4 and tile_tokens=512.*pass only one"),
    ({"targets": []}, r"targets=\[\] must be"),
    ({"targets": ["MLP", ""]}, r"targets=\['MLP', ''\] must be"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    """Fields are checked when the policy is made, with the value and the bound or the choices."""
    with pytest.raises(ValueError, match=message):
        Tiling(**fields)
