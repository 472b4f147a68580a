"""A compiled model with compiled tiles and activation checkpointing, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled import Tiling, prepare
from tests.engines.cells import draw, wrapped
from tests.engines.conftest import OnRanks
from tests.models import TinyLM, lm_loss
from tests.parity import worst

PATIENCE = 240.0
"""Seconds, because compiling takes longer than the steps."""
LENGTHS = ((24, 20), (20, 28), (16, 24), (28, 20))
"""Of two ranks, in each step."""


def trained(engine: str, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the gradients of the last step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = TinyLM().double()
    compiler: dict[str, Any] = {"backend": "aot_eager"}
    prepare(net, tiling=Tiling(4, compile=compiled and compiler), activation_checkpointing=True)
    model, _, _ = wrapped(engine, net)
    call = torch.compile(model, **compiler) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = list[float]()
    for lengths in LENGTHS:
        optimizer.step()
        optimizer.zero_grad()
        ids = draw((2, lengths[dist.get_rank()]), dist.get_rank())
        loss = lm_loss(call(ids), ids)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


@pytest.mark.slow
def test_compiled(on_ranks: OnRanks) -> None:
    """A compiled and sharded model with compiled tiles has the losses and gradients of an uncompiled one."""
    plain = on_ranks.once(trained, "fsdp2", False)
    found = on_ranks(trained, "fsdp2", True, timeout=PATIENCE)
    for (losses, gradients), (true_losses, true) in zip(found, plain, strict=True):
        assert losses == pytest.approx(true_losses, rel=1e-10)
        assert worst(gradients, true) < 1e-9
