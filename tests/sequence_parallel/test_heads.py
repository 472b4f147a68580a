"""Heads at a time: the same results, in less memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel
from tests.sequence_parallel.models import CASES, HeadsBlock, HeadsOnly, Pooled, causal, ids
from tests.sequence_parallel.runs import Counts, against_whole, errors
from tests.world import World

TILES, KEPT = 2, 4
NAMES = ["llama", "llama 8/8", "llama 6/3", "packed", "gemma 3", "qwen 3", "mixtral"]


@pytest.mark.table("(llama|mixtral)-.*-1|packed-.*-2|llama 8/8-.*-4")
@pytest.mark.parametrize(
    ("name", "tiles", "size"),
    [(name, KEPT, 1) for name in NAMES] + [(name, TILES, 2) for name in NAMES] + [("llama 8/8", KEPT, 4)],
    ids=str,
)
def test_gradients(name: str, tiles: int, size: int, four_ranks: World) -> None:
    """Loss and gradients are those of all heads at once, also where attention is kept."""
    policy = ActivationCheckpointing(keep="attention" if tiles == KEPT else None)
    for found in four_ranks(errors, [name], size, {"head_tiles": tiles}, {"activation_checkpointing": policy}):
        assert found[name] < CASES[name].error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: block.q_proj.register_forward_hook(lambda *_: None), "has a hook on its Linear"),
        (lambda block: setattr(block, "norm", nn.LayerNorm(64)), "q_proj is not given the module's own input"),
        (lambda block: setattr(block, "last", nn.Dropout(0.5)), "does not return what its o_proj returns"),
        (lambda block: setattr(block, "q_proj", nn.Sequential(block.q_proj)), "needs attention modules with head_dim"),
    ],
    ids=["hook", "norm inside", "dropout behind", "other projection"],
)
def test_refused(change: Any, message: str) -> None:
    """Attention that does more than project its input, attend and project is refused by name."""
    module = HeadsOnly(64, 4)
    for block in module.blocks:
        change(block)
    with (
        pytest.raises(ValueError, match=message),
        lt_tiled.prepare(module, sequence_parallel=SequenceParallel(1, head_tiles=2)),
    ):
        module(torch.randn(1, 8, 64))


def test_adapters_on_projections() -> None:
    """Another layer in place of a projection, as LoRA puts there, is named with what to do."""
    module = HeadsOnly(64, 4)
    for block in module.blocks:
        block.q_proj = nn.Sequential(block.q_proj)
    with pytest.raises(
        ValueError, match=r"nn.Linear in place of .*Sequential \(LoRA: choose other target_modules\), or"
    ):
        lt_tiled.prepare(module, sequence_parallel=SequenceParallel(1, head_tiles=2))


@pytest.mark.parametrize("keep", [None, "attention", "attention_output"])
def test_blocks_that_are_attention(keep: Any) -> None:
    """A block that is the attention module itself has both head tiles and activation checkpointing."""
    torch.manual_seed(0)
    module, x, found = HeadsOnly(64, 4).double(), torch.randn(1, 8, 64, dtype=torch.float64), []
    checkpointing, policy = ActivationCheckpointing(keep=keep), SequenceParallel(1, head_tiles=2)
    for policies in ({}, {"activation_checkpointing": checkpointing, "sequence_parallel": policy}):
        with lt_tiled.prepare(module, **policies) if policies else nullcontext():
            found.append(torch.autograd.grad(module(x).square().sum(), list(module.parameters())))
    torch.testing.assert_close(found[1], found[0])


def test_one_rank_keeps_its_outputs() -> None:
    """With one rank nothing is cut: logits and hidden states are those of all heads, with labels, too."""
    model, given = causal("llama")(), {"input_ids": ids(2, 37), "labels": ids(2, 37), "output_hidden_states": True}
    true = model(**given)
    policy = SequenceParallel(1, head_tiles=2, self_check=False)
    with lt_tiled.prepare(model, sequence_parallel=policy), Counts() as counts:
        found = model(**given)
    assert counts.found["attention"] == 2 * 2  # two layers, in two parts each
    for one, other in zip(
        (found.loss, found.logits, *found.hidden_states), (true.loss, true.logits, *true.hidden_states), strict=True
    ):
        torch.testing.assert_close(one, other)


class Normed(HeadsBlock):
    """Attention with its norm inside."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class NormOfAllHeads(HeadsBlock):
    """Attention whose queries are normalized over all heads, without a weight."""

    def __init__(self) -> None:
        super().__init__(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = F.layer_norm(q, q.shape[-1:])
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def in_head_tiles(block: Callable[[], nn.Module]) -> str:
    return against_whole(Pooled([0, 1, 2], block, 32), {"input_ids": ids(2, 37)}, head_tiles=2)[2]


def test_head_tiles_with_a_norm_inside(world: World) -> None:
    """An attention module that projects something else than its input has no gradients in parts, and is refused."""
    for message in world(in_head_tiles, Normed):
        assert re.search("is not given the module's own input.*set head_tiles=1", message)


def test_head_tiles_with_a_norm_of_all_heads(world: World) -> None:
    """What a module computes of all of its heads differs in parts, and the self-check says so."""
    for message in world(in_head_tiles, NormOfAllHeads):
        assert re.search("another output when its heads are computed in 2 parts.*set head_tiles=1", message)


def of_olmo() -> str:
    inputs = {"input_ids": (x := ids(2, 24)), "labels": x}
    return against_whole(causal("olmo2")(), inputs, head_tiles=2)[2]


def test_head_tiles_with_weights_of_all_heads(world: World) -> None:
    """A norm with weights for all heads is refused with a remedy."""
    for message in world(of_olmo):
        assert re.search("cannot compute some of its heads.*Set head_tiles=1", message)
