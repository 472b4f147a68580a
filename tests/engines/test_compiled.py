"""Compiled models and blocks with tiles and activation checkpointing, on two ranks."""

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


LENGTHS = ((24, 20), (20, 28), (16, 24), (24, 24), (28, 20), (24, 28))
"""Of two ranks, in each batch. Two batches make a step: the compiler meets a new length while there are gradients. Not
with compiled tiles: it fails on FSDP1's views of weights while their gradients are sharded.
"""


def trained(engine: str, how: str, compiled: bool) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Return the losses, the number of graphs after each batch, and the gradients of the last step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net, compiler = TinyLM().double(), {"backend": "aot_eager"}
    tiling = Tiling(4, compile=compiler if compiled and how == "tiles" else False)
    prepare(net, tiling=tiling, activation_checkpointing=engine != "alone")
    for part in [net, *net.blocks] if compiled and how == "in place" else []:
        part.compile(**compiler)
    model: Any = net
    if engine != "alone":
        model, _, _ = wrapped(engine, net)
    call = torch.compile(model, **compiler) if compiled and how == "model" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, graphs = list[float](), list[int]()
    for index, lengths in enumerate(LENGTHS):
        if index % 2 == 0 or how == "tiles":
            optimizer.step()
            optimizer.zero_grad()
        ids = draw((2, lengths[dist.get_rank()]), dist.get_rank())
        loss = lm_loss(call(ids), ids)
        loss.backward()
        losses.append(float(loss.detach()))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:  # the other rank may have all of it
            gradients[name] = weight.grad.full_tensor() if engine == "fsdp2" else weight.grad
    return losses, graphs, gradients


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("alone",), ("fsdp", "fsdp2")], ids=["alone", "sharded"])
@pytest.mark.parametrize("how", ["model", "in place", "tiles"])
def test_compiled(how: str, engines: tuple[str, ...], on_ranks: OnRanks) -> None:
    """A compiled model, modules compiled in place, and compiled tiles have the losses and gradients of uncompiled ones,
    sharded and with activation checkpointing as well. Later lengths compile nothing.
    """
    for engine in engines:
        plain = on_ranks.once(trained, engine, "tiles" if how == "tiles" else "in place", False)
        found = on_ranks(trained, engine, how, True, timeout=PATIENCE)
        for (losses, graphs, gradients), (true_losses, _, true) in zip(found, plain, strict=True):
            assert losses == pytest.approx(true_losses, rel=1e-10)
            assert worst(gradients, true) < 1e-9
            assert graphs[1] == graphs[-1]
