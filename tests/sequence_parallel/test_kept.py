"""What a checkpointed block keeps for its recompute, and the collectives of a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import lt_tiled
from lt_tiled import SequenceParallel, Tiling
from tests.sequence_parallel.models import CASES, causal, gpt
from tests.sequence_parallel.runs import Counts, collectives, errors, reads, step, twice, value_of, worst
from tests.world import World

LAYERS = 3


CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
EVERYTHING: dict[str, Any] = {"activation_checkpointing": "disk", "tiling": Tiling(3, self_check=False)}


@pytest.mark.table("llama-.*-attention|(gemma 3|packed)-.*-exchange|(llama|hand-written)-.*-attention_output")
@pytest.mark.parametrize("keep", ["exchange", "attention", "attention_output"])
@pytest.mark.parametrize(
    ("name", "policies"),
    [(name, CHECKPOINTED) for name in ("packed", "gemma 3", "hand-written")] + [("llama", EVERYTHING)],
    ids=str,
)
def test_gradients(name: str, policies: dict[str, Any], keep: str, four_ranks: World) -> None:
    """Loss and gradients do not depend on what is kept, nor on where."""
    for found in four_ranks(errors, [name], 2, {"keep": keep}, policies):
        assert found[name] < (3e-7 if "tiling" in policies else CASES[name].error)


@pytest.mark.table("packed-attention|sliding window-exchange|2/1-attention_output")
@pytest.mark.parametrize("keep", [None, "exchange", "attention", "attention_output"])
@pytest.mark.parametrize("name", ["2/1", "packed", "sliding window"])
def test_few_heads(name: str, keep: str | None, four_ranks: World) -> None:
    """Nor where several ranks have the same heads, and keep what some of the tokens attend to."""
    name = f"few heads, {name}"
    for found in four_ranks(errors, [name], 4, {"keep": keep}, {"activation_checkpointing": "cpu"}):
        assert found[name] < 1e-12


@pytest.mark.parametrize(("keep", "count"), [(None, 6), ("exchange", 4), ("attention", 4), ("attention_output", 6)])
def test_collectives(keep: str | None, count: int, four_ranks: World) -> None:
    """A layer makes two all-to-alls in the forward pass and two in the backward pass, and two in its recompute unless
    they are kept; a step makes one all-reduce for the loss, and nothing else.
    """
    for found in four_ranks(collectives, LAYERS, {"keep": keep}):
        assert found == {"all_to_all": count * LAYERS, "group_mean": 1}


@pytest.mark.parametrize(("keep", "count"), [(None, 2), ("exchange", 2), ("attention", 1), ("attention_output", 1)])
def test_attention_runs(keep: str | None, count: int, four_ranks: World) -> None:
    """Where attention or its output is kept, it is not computed in the recompute."""
    for found in four_ranks(collectives, LAYERS, {"keep": keep}, True):
        assert found["attention"] == count * LAYERS


@pytest.mark.parametrize("name", ["llama", "hand-written"])
def test_one_rank(name: str) -> None:
    """One rank alone keeps attention: the same gradients without a second run of it in the recompute."""
    model, inputs, found = CASES[name].build(), CASES[name].inputs(), {}
    for keep in (None, "attention", "attention_output"):
        model.zero_grad(set_to_none=True)
        policy = SequenceParallel(keep=keep)
        with lt_tiled.prepare(model, sequence_parallel=policy, activation_checkpointing=True), Counts() as counts:
            value_of(model(**inputs)).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        found[keep] = counts.found["attention"], gradients
    assert [count for count, _ in found.values()] == [2 * 2, 2, 2]
    torch.testing.assert_close(found["attention"][1], found[None][1])
    torch.testing.assert_close(found["attention_output"][1], found[None][1])


@pytest.mark.parametrize("keep", ["attention", "attention_output"])
def test_dropout(keep: str) -> None:
    """Dropout behind attention that is not computed again has the mask of the forward pass."""
    model, inputs = causal("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)(), CASES["llama"].inputs()
    policies = {"activation_checkpointing": True, "sequence_parallel": SequenceParallel(keep=keep)}
    found = []
    for prepared in ({}, policies):
        torch.manual_seed(0)
        with lt_tiled.prepare(model, **prepared) if prepared else nullcontext():
            value_of(model(**inputs)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    torch.testing.assert_close(*found)


def test_one_rank_exchanges_nothing() -> None:
    """What one rank exchanges cannot be kept, and the message says so."""
    with pytest.raises(ValueError, match=r"one rank \(size=1\) exchanges nothing: set keep='attention'"):
        SequenceParallel(keep="exchange")


def test_keep_without_activation_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks without a recompute keep nothing for it, and a warning says so."""
    with lt_tiled.prepare(gpt()(), sequence_parallel=SequenceParallel(keep="attention")):
        assert "keep='attention' has no effect" in caplog.text


def frozen_below() -> float:
    """The error of the gradients of a second block behind a frozen one."""
    model, found = gpt()(), []
    for part in (model.embed, model.positions, model.blocks[0]):
        part.requires_grad_(False)
    policy = SequenceParallel(2, keep="attention")
    for policies in ({}, {"sequence_parallel": policy}):
        with lt_tiled.prepare(model, activation_checkpointing=True, **policies):
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


@pytest.mark.parametrize("keep", [None, "exchange", "attention"])
def test_second_backward_pass(keep: str | None, four_ranks: World) -> None:
    """``retain_graph=True`` allows a second backward pass with the same gradients."""
    for first, second in four_ranks(twice, {"keep": keep}):
        assert first == second
