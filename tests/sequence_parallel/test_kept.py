"""What a block with activation checkpointing keeps for its recompute, and the collectives of a step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_tiled
from lt_tiled import ActivationCheckpointing, Tiling
from lt_tiled.sequence_parallel.groups import Groups
from tests.sequence_parallel.models import CASES, HeadsOnly, causal, gpt
from tests.sequence_parallel.runs import Counts, collectives, errors, reads, step, twice, value_of, worst
from tests.world import World

LAYERS = 3


EVERYTHING: dict[str, Any] = {"offload": "disk"}


@pytest.mark.table("(llama|hand-written)-.*")
@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in ("packed", "gemma 3", "hand-written")] + [("llama", EVERYTHING)],
    ids=str,
)
def test_gradients(name: str, fields: dict[str, Any], four_ranks: World) -> None:
    """Loss and gradients do not depend on what is kept, nor on where."""
    policies: dict[str, Any] = {"activation_checkpointing": ActivationCheckpointing(keep="attention", **fields)}
    if fields:
        policies["tiling"] = Tiling(3, self_check=False)
    for found in four_ranks(errors, [name], 2, policies):
        assert found[name] < (3e-7 if "tiling" in policies else CASES[name].error)


@pytest.mark.parametrize(("keep", "count"), [(None, 6), ("attention", 4)])
def test_collectives(keep: Any, count: int, four_ranks: World) -> None:
    """A layer makes two all-to-alls in the forward pass and two in the backward pass, and two in its recompute unless
    they are kept; a step makes one all-reduce for the loss, and nothing else.
    """
    for found in four_ranks(collectives, LAYERS, keep):
        assert found == {"all_to_all": count * LAYERS, "group_mean": 1}


@pytest.mark.parametrize(("keep", "count"), [(None, 2), ("attention", 1)])
def test_attention_runs(keep: Any, count: int, four_ranks: World) -> None:
    """Where attention is kept, it is not computed in the recompute."""
    for found in four_ranks(collectives, LAYERS, keep, True):
        assert found["attention"] == count * LAYERS


@pytest.mark.parametrize("name", ["llama", "hand-written"])
def test_one_rank(name: str) -> None:
    """One rank alone keeps attention: the same gradients without a second run of it in the recompute."""
    model, inputs, found = CASES[name].build(), CASES[name].inputs(), {}
    keeps: list[Any] = [None, "attention"]
    for keep in keeps:
        model.zero_grad(set_to_none=True)
        policy = ActivationCheckpointing(keep=keep)
        with lt_tiled.prepare(model, activation_checkpointing=policy), Counts() as counts:
            value_of(model(**inputs)).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        found[keep] = counts.found["attention"], gradients
    assert [count for count, _ in found.values()] == [2 * 2, 2]
    torch.testing.assert_close(found["attention"][1], found[None][1])


def test_dropout() -> None:
    """Dropout behind attention that is not computed again has the mask of the forward pass."""
    model, inputs = causal("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)(), CASES["llama"].inputs()
    found = []
    for policy in (None, ActivationCheckpointing(keep="attention")):
        torch.manual_seed(0)
        with lt_tiled.prepare(model, activation_checkpointing=policy) if policy else nullcontext():
            value_of(model(**inputs)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    torch.testing.assert_close(*found)


class LearnedBias(HeadsOnly):
    """Attention with a learned bias, which is its mask, and a learned temperature, which its function reads."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.bias, self.temperature = nn.Parameter(torch.randn(4, 64)), nn.Parameter(torch.ones(()))
        attention = lt_tiled.shared_attention(self.attend)
        for block in self.blocks:
            block.attention = attention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = query @ key.mT * self.temperature + mask[..., : query.shape[1], :, :].mean(-3, keepdim=True)
        return scores.softmax(-1) @ value

    def forward(self, x: Tensor) -> Tensor:
        distance = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()
        mask = self.bias[:, distance].mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x, mask)
        return x


def error_of_learned_bias(size: int, keep: Any) -> float:
    torch.manual_seed(0)
    model, x = LearnedBias().double(), {"x": torch.randn(2, 13, 32, dtype=torch.float64)}
    reference, group = copy.deepcopy(model), Groups.of_size(size).group
    for block in reference.blocks:
        block.attention = lt_tiled.shared_attention(reference.attend)
    for name in ("bias", "temperature"):
        assert getattr(model, name) is not getattr(reference, name)
    true = step(reference, x)
    policies = {"activation_checkpointing": ActivationCheckpointing(keep=keep), "sequence_parallel": size}
    with lt_tiled.prepare(model, group=group, **policies):
        return worst(step(model, x), true)


@pytest.mark.parametrize("size", [1, 2])
def test_learned_bias(size: int, world: World) -> None:
    """What attention reads besides its inputs has its gradient."""
    for error in world(error_of_learned_bias, size, "attention"):
        assert error < 1e-12


class ComplexRope(HeadsOnly):
    """Rotates queries inside of its attention, by way of complex numbers with learned frequencies."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.turn = nn.Parameter(torch.randn(4))
        for block in self.blocks:
            block.attention = lt_tiled.shared_attention(self.attend)

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, turn: Tensor) -> Tensor:
        turned = torch.view_as_complex(query.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(turn), turn
        )
        return F.scaled_dot_product_attention(torch.view_as_real(turned).flatten(-2), key, value)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.turn)
        return x


def test_complex_views() -> None:
    """Attention of a view of complex numbers has the gradients of no recompute."""
    torch.manual_seed(0)
    model, x = ComplexRope().double(), torch.randn(2, 13, 32, dtype=torch.float64)
    true = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with lt_tiled.prepare(model, activation_checkpointing=ActivationCheckpointing(keep="attention")):
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, true)


class NoAttention(nn.Module):
    """Blocks without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_nothing_to_keep(caplog: pytest.LogCaptureFixture) -> None:
    """A block without attention is recomputed, and one line says so."""
    caplog.set_level("INFO")
    policy = ActivationCheckpointing(keep="attention", targets=["blocks.*"])
    with lt_tiled.prepare(model := NoAttention(), activation_checkpointing=policy):
        model(torch.randn(1, 4, 8)).sum().backward()
    assert caplog.text.count("blocks.0 (Sequential): nothing was kept, so all of it is recomputed") == 1


def frozen_below() -> float:
    """The error of the gradients of a second block behind a frozen one."""
    model, found = gpt()(), []
    for part in (model.embed, model.positions, model.blocks[0]):
        part.requires_grad_(False)
    kept = {"activation_checkpointing": ActivationCheckpointing(keep="attention"), "sequence_parallel": 2}
    for policies in ({"activation_checkpointing": True}, kept):
        with lt_tiled.prepare(model, **policies):
            found.append(step(model, CASES["llama"].inputs()))
    return worst(found[1], found[0])


def test_frozen_blocks(world: World) -> None:
    """Attention without gradients, as in frozen blocks, is not kept; the others have theirs."""
    for error in world(frozen_below):
        assert error < 1e-12


@pytest.mark.table("packed|hand-written")
@pytest.mark.parametrize("name", ["llama", "packed", "padded left", "hand-written"])
def test_reads_of_values(name: str, world: World) -> None:
    """A step reads no more values on the host, where a GPU would be waited for, than without sequence parallelism."""
    for without, shared in world(reads, name):
        assert shared <= without


@pytest.mark.parametrize("keep", [None, "attention"])
def test_second_backward_pass(keep: Any, four_ranks: World) -> None:
    """``retain_graph=True`` allows a second backward pass with the same gradients."""
    for first, second in four_ranks(twice, keep):
        assert first == second
