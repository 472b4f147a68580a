"""Compiled blocks with tiles and activation checkpointing, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lt_tiled import Tiling, prepare
from tests.engines.cells import draw
from tests.engines.conftest import OnRanks
from tests.engines.test_plain_loops import wrapped
from tests.models import TinyLM, lm_loss
from tests.parity import near

PATIENCE = 240.0
"""Seconds, because compiling takes longer than the steps."""


def losses(engine: str, compiled: bool) -> list[float]:
    """The losses of five steps on several lengths, the first of which blocks run uncompiled on several ranks."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = TinyLM()
    prepare(net, tiling=Tiling(4), activation_checkpointing=True)
    for block in net.blocks if compiled else ():
        block.compile(backend="aot_eager")
    model, backward, step = wrapped(engine, net)
    found = []
    for length in (24, 20, 16, 24, 28):
        ids = draw((2, length), dist.get_rank())
        loss = lm_loss(model(ids), ids)
        backward(loss)
        step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_losses(engine: str, on_ranks: OnRanks) -> None:
    """Compiled blocks have the losses of uncompiled ones under an engine of each kind."""
    plain = on_ranks(losses, engine, False)
    assert on_ranks(losses, engine, True, timeout=PATIENCE) == [near(each) for each in plain]
