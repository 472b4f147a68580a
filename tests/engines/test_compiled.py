"""Compiled models and blocks with tiles and activation checkpointing: on two ranks, and through Trainer and Fabric."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

import lt_tiled
from lt_tiled import Tiling, prepare
from tests.engines.cells import draw, wrapped
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import near, worst

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


def losses(engine: str, compiled: bool) -> list[float]:
    """The losses of steps on these lengths, with blocks that are compiled or not."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = TinyLM()
    prepare(net, tiling=Tiling(4), activation_checkpointing=True)
    for block in net.blocks if compiled else []:
        block.compile(backend="aot_eager")
    model, backward, step = wrapped(engine, net)
    found = []
    for lengths in LENGTHS:
        ids = draw((2, lengths[dist.get_rank()]), dist.get_rank())
        loss = lm_loss(model(ids), ids)
        backward(loss)
        step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_losses(engine: str, on_ranks: OnRanks) -> None:
    """Compiled blocks have the losses of uncompiled ones: the rank that compiles nothing waits for the other."""
    plain = on_ranks(losses, engine, False)
    assert on_ranks(losses, engine, True, timeout=PATIENCE) == [near(each) for each in plain]


POLICIES: dict[str, Any] = {"tiling": Tiling(4), "activation_checkpointing": True}


class Plain(LitTiny):
    """Keeps nothing in its step, so that nothing in it makes the compiler compile again."""

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return lm_loss(self.net(ids), ids)


class Look(pl.Callback):
    """Notes losses, the number of graphs after each step, and what is tiled and recomputed at the end."""

    def __init__(self) -> None:
        self.losses, self.graphs = list[float](), list[int]()

    def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def on_train_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        report = run.strategy.prepared[0].report()
        self.report = [(row.path, row.tiles) for row in report.tiled], [row.path for row in report.blocks]


def in_trainer(compiled: bool, steps: int = 4) -> Look:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module, look = Plain(), Look()
    module.configure_model()
    strategy = lt_tiled.TiledSingleDeviceStrategy(device="cpu", **POLICIES)
    run = trainer(strategy, callbacks=[look], max_steps=steps, limit_val_batches=0)
    run.fit(torch.compile(module, backend="eager") if compiled else module)
    return look


@pytest.mark.slow
def test_trainer() -> None:
    """A LightningModule in ``torch.compile`` trains in Trainer as an uncompiled one, with the same report, and compiles
    nothing after its second step.
    """
    plain, look = in_trainer(False), in_trainer(True)
    assert look.losses == near(plain.losses)
    assert look.report == plain.report
    assert 0 < look.graphs[1] == look.graphs[-1]


def in_fabric(compiled: bool, reapply: bool = True) -> tuple[list[float], list[int], Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net, found, graphs = TinyLM(), list[float](), list[int]()
    fabric = Fabric(
        accelerator="cpu", devices=1, strategy=lt_tiled.fabric.TiledSingleDeviceStrategy(device="cpu", **POLICIES)
    )
    fabric.launch()
    module = torch.compile(net, backend="eager") if compiled else net
    model, optimizer = fabric.setup(module, torch.optim.SGD(net.parameters(), 1.0), _reapply_compile=reapply)
    for length in (24, 20, 16, 24, 28):
        ids = draw((2, length), 0)
        loss = lm_loss(model(ids), ids)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    report = fabric.strategy.prepared[0].report()
    fabric.strategy.release()
    return found, graphs, ([(row.path, row.tiles) for row in report.tiled], [row.path for row in report.blocks])


@pytest.mark.slow
@pytest.mark.parametrize("reapply", [True, False])
def test_fabric(reapply: bool) -> None:
    """A compiled model trains in Fabric as an uncompiled one, with the same report, whether Fabric compiles it anew
    after wrapping it or not, and compiles nothing after its second length.
    """
    plain, _, report = in_fabric(False)
    found, graphs, compiled_report = in_fabric(True, reapply)
    assert found == near(plain)
    assert compiled_report == report
    assert 0 < graphs[1] == graphs[-1]
