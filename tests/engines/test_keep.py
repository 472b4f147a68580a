"""Blocks that keep attention, or outputs of other operators, for their recompute, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_tiled import ActivationCheckpointing
from lt_tiled.planner.ledger import Ledger
from tests.engines.cells import ENGINES, draw, launch, set_up
from tests.engines.conftest import OnRanks
from tests.models import tiny_llama

FIELDS = {"hidden_size": 64, "intermediate_size": 224, "num_key_value_heads": 1, "vocab_size": 8}
TOKENS = 2048
"""Times the hidden size as many as 128K are for Llama 3 8B: attention has 1.07 GFLOP per token and layer there, and the
other products 0.44.
"""


def steps(engine: str, keep: Any, checkpointed: bool = True, offload: Any = None) -> tuple[list[float], int]:
    """The losses of three steps, and the FLOPs of the last one."""
    policy = ActivationCheckpointing(keep=keep, offload=offload, keep_last=0) if checkpointed else None
    fabric = launch(engine, tiling=None, activation_checkpointing=policy)
    model, optimizer = set_up(fabric, tiny_llama(**FIELDS), engine, lambda weights: torch.optim.SGD(weights, 0.1))
    losses = []
    for step in range(3):
        x = draw((1, TOKENS), step) % FIELDS["vocab_size"]
        with Ledger() as counter:
            loss = model(input_ids=x, labels=x, use_cache=False).loss
            fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    fabric.strategy.release()
    return losses, counter.flops


@pytest.mark.table("ddp-None|zero3-cpu")
@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
@pytest.mark.parametrize("engine", ENGINES)
def test_kept(engine: str, offload: Any, on_ranks: OnRanks) -> None:
    """A step takes 1.06 instead of 1.27 times the FLOPs of one without activation checkpointing, and has its losses,
    wherever attention is kept.

    They are the same bit for bit. The recompute leaves out the last product of each block, but under ZeRO-3, whose
    linear layers save their inputs: 1.09 instead of 1.30.
    """
    expected = (1.09, 1.30) if engine == "zero3" else (1.06, 1.27)
    plain = on_ranks.once(steps, engine, None, False)
    recomputed, kept = on_ranks.once(steps, engine, None), on_ranks(steps, engine, "attention", True, offload)
    for (true, least), (losses, most), (found, flops) in zip(plain, recomputed, kept, strict=True):
        assert (flops / least, most / least) == pytest.approx(expected, abs=0.005)
        assert found == losses == true


@pytest.mark.table("ddp")
@pytest.mark.parametrize("engine", ENGINES)
def test_policy_of_operators(engine: str, on_ranks: OnRanks) -> None:
    """Blocks that keep the outputs of products and of attention recompute none of their FLOPs, with the same losses."""
    operators = ["aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"]
    plain, kept = on_ranks.once(steps, engine, None, False), on_ranks(steps, engine, operators)
    for (true, least), (found, flops) in zip(plain, kept, strict=True):
        assert flops == least
        assert found == true
