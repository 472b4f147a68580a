"""Every kind of model trains with each engine, in each training loop, in tiles as it does untiled under DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

import lt_tiled
from lt_tiled import Tiling, prepare
from lt_tiled.callbacks import Tiled
from lt_tiled.report import Report
from tests.engines.cells import launch, set_up, strategy, wrapped
from tests.engines.kinds import COMPILER, KINDS, UNTILED, Kind
from tests.lit import Tiny, replaced, trainer
from tests.parity import near
from tests.world import OnRanks

pytestmark = pytest.mark.self_checks

STEPS = 4
TILED: dict[str, Any] = {"tiling": Tiling(3, self_check=False), "activation_checkpointing": True}
Losses = tuple[list[float], list[float]]
"""Of each step, and of a batch after it in evaluation mode."""


def strategy_of(home: Any, engine: str, kind: Kind, policies: dict[str, Any]) -> Any:
    """A strategy with the arguments of a kind, that are of its engine."""
    options = kind.arguments if engine in kind.engines else {}
    if engine == "ddp" and kind.unused:
        options = {"find_unused_parameters": True}
    chosen = strategy(home, engine, **policies, **options)
    if engine == "zero3":  # else a bucket may still have a weight whose gradient arrives late
        chosen.config["zero_optimization"]["reduce_bucket_size"] = 1
    return chosen


def optimizer_of(kind: Kind, weights: Any) -> torch.optim.Optimizer:
    trained = [weight for weight in weights if weight.requires_grad]
    return torch.optim.SGD(trained, kind.rate, momentum=0.9)


def check_report(model: nn.Module, kind: Kind, policies: dict[str, Any]) -> None:
    """Modules ran in several tiles, and blocks were checkpointed and offloaded, if the policies say so."""
    report = Report.of(model)
    if policies["tiling"] and not kind.untiled:
        tiles = [row.tiles for row in report.tiled if dist.get_rank() == 0 or "visual" not in row.path]
        assert tiles
        assert min(tiles) > 1
    checkpointing = policies["activation_checkpointing"]
    assert bool(report.blocks) == bool(checkpointing)
    if getattr(checkpointing, "offload", None) == "disk":
        assert report.offloaded is not None
        assert report.offloaded.disk_bytes > 0


def train(model: Any, kind: Kind, step_on: Callable[[int], Tensor]) -> Losses:
    """Train, with an evaluation after each step."""
    losses, val_losses = list[float](), list[float]()
    for step in range(STEPS):
        losses.append(float(step_on(step).detach()))
        model.eval()
        with torch.no_grad():
            val_losses.append(float(kind.loss(model, STEPS, dist.get_rank())))
        model.train()
    return losses, val_losses


def in_fabric(engine: str, kind: Kind, policies: dict[str, Any]) -> Losses:
    """Losses in Fabric."""
    fabric = launch(strategy_of(lt_tiled.fabric, engine, kind, policies))
    net = kind.build()

    def step_on(step: int) -> Tensor:
        waits = (step + 1) % kind.accumulate > 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = kind.loss(model, step, fabric.global_rank)
            fabric.backward(loss)
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    try:
        model, optimizer = set_up(fabric, net, engine, partial(optimizer_of, kind))
        found = train(model, kind, step_on)
        check_report(net, kind, policies)
    finally:
        fabric.strategy.release()
    assert replaced(net) == 0
    return found


class Steps(Tiny):
    """What a LightningModule of either package does with a model of a kind."""

    def __init__(self, kind: Kind, policies: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.policies = kind, policies
        torch.manual_seed(0)
        self.net = kind.build()  # ZeRO-3 would draw other weights in configure_model

    def configure_model(self) -> None:
        if self.kind.configure is not None and not self.losses:
            self.kind.configure(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.kind, self.trainer.model.parameters())

    def training_step(self, _: Tensor, index: int) -> Tensor:
        loss = self.kind.loss(self.net, len(self.losses), dist.get_rank())
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, _: Tensor, index: int) -> None:
        self.val_losses.append(float(self.kind.loss(self.net, STEPS, dist.get_rank())))

    def on_train_end(self) -> None:
        check_report(self, self.kind, self.policies)


class Lit(Steps, pl.LightningModule):
    """For the Trainer of ``lightning``."""


def fit(module: Any, chosen: Any, **options: Any) -> Losses:
    """Fit a module, whose model is plain afterwards."""
    ranks = int(os.environ.get("WORLD_SIZE", "2"))  # Lightning starts the second one itself, if nobody did
    options = {"devices": ranks, **options, **module.kind.options}
    steps = STEPS // module.kind.options.get("accumulate_grad_batches", 1)
    evaluation = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer(chosen, max_steps=steps, **evaluation, **options).fit(module)
    assert replaced(module) == 0
    return module.losses, module.val_losses


def in_trainer(engine: str, kind: Kind, policies: dict[str, Any]) -> Losses:
    """The same in the Trainer of ``lightning``."""
    return fit(Lit(kind, policies), strategy_of(lt_tiled, engine, kind, policies))


def in_other_trainer(engine: str, kind: Kind, policies: dict[str, Any]) -> Losses:
    """The same in the Trainer of ``pytorch_lightning``."""
    import pytorch_lightning

    import lt_tiled.pytorch_lightning as home

    module = type("OtherLit", (Steps, pytorch_lightning.LightningModule), {})(kind, policies)
    return fit(module, strategy_of(home, engine, kind, policies), kind=pytorch_lightning.Trainer)


def by_callback(engine: str, kind: Kind, policies: dict[str, Any]) -> Losses:
    """The same with a callback beside a strategy of Lightning, or of ours without policies where theirs needs a GPU."""
    stock: dict[str, Any] = {"ddp": DDPStrategy(), "fsdp2": ModelParallelStrategy(2, 1)}
    chosen = stock.get(engine) or strategy_of(lt_tiled, engine, kind, UNTILED)
    callback = Tiled(policies["tiling"], policies["activation_checkpointing"])
    return fit(Lit(kind, policies), chosen, callbacks=[callback])


def in_plain_loop(engine: str, kind: Kind, policies: dict[str, Any], when: str = "before") -> Losses:
    """Losses without Lightning: the model is prepared before or after the engine wraps it, runs before that, is a copy
    of a prepared one, or is compiled.
    """
    torch.manual_seed(0)
    net = kind.build()
    if when != "after":
        prepare(net, **policies)
    if when == "used":
        kind.loss(net, STEPS, 0).backward()
        net.zero_grad()
    if when == "copy":
        net = deepcopy(net)
    model, backward, step = wrapped(engine, net)
    if when == "after":
        prepare(model, **policies)
    if when == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, **COMPILER)

    def step_on(index: int) -> Tensor:
        loss = kind.loss(model, index, dist.get_rank())
        backward(loss)
        step()
        return loss

    found = train(model, kind, step_on)
    check_report(net, kind, policies)
    return found


LOOPS = {
    "fabric": in_fabric,
    "trainer": in_trainer,
    "pytorch_lightning": in_other_trainer,
    "callback": by_callback,
    "plain": in_plain_loop,
    "plain, prepared after": partial(in_plain_loop, when="after"),
    "plain, used before": partial(in_plain_loop, when="used"),
    "plain, a copy": partial(in_plain_loop, when="copy"),
    "plain, compiled": partial(in_plain_loop, when="compiled"),
}
CELLS = [(loop, engine, name) for name, kind in KINDS.items() for loop in kind.loops for engine in kind.engines]


def run(engine: str, loop: str, name: str, tiled: bool) -> Losses:
    kind = KINDS[name]
    return LOOPS[loop](engine, kind, TILED | kind.policies if tiled else UNTILED)


@pytest.mark.table(
    "fabric-(ddp|fsdp|zero2)-tiles|fabric-(fsdp_flat|zero1)-checkpointed|fabric-(ddp|fsdp2|zero3)-everything"
    "|trainer-ddp-tiles|trainer-.*-everything|pytorch_lightning-(fsdp2|zero2)-everything|plain-(fsdp|zero1)-tiles"
    "|plain, .*-(zero2-after|ddp-after|zero3-used|zero3-copy|fsdp2-compiled)"
    "|callback-(ddp|zero3)-callback|callback-fsdp2-sharded by hand"
    "|fabric-zero3-random state and buffers|fabric-fsdp2-accumulation"
    "|trainer-(ddp|zero3)-accumulation by Trainer|trainer-(fsdp_flat|zero1)-clipping"
    "|fabric-fsdp-(random state and buffers|policy of norms)"
    "|trainer-.*-(static graph|.* own checkpointing|.* offload|wrapped by hand)"
    "|fabric-zero3-(frozen|unused|tied|LoRA|DoRA on the head|a copy of the head|LoRA on all|Gemma 2)"
    "|fabric-zero3-(4096 and 512 tokens|two calls|product|no gradient between|last is unused|own leaves|mask first)"
    "|fabric-fsdp2-(other experts on each rank|LoRA on experts|Mixtral|4096 and no tokens|two calls)"
    "|fabric-fsdp-(LoRA on the head|BERT|unused|tied)|fabric-zero2-(tokens are mixed|three calls)"
    "|fabric-zero1-4096 and 1 token|plain-zero2-.*|fabric-ddp-(tied|Mixtral|product|images on one rank.*)"
)
@pytest.mark.parametrize(("loop", "engine", "name"), CELLS)
def test_losses(loop: str, engine: str, name: str, on_ranks: OnRanks) -> None:
    """The losses of four steps, and of an evaluation after each, are the untiled ones under DDP, or on the same engine
    where engines differ, and modules are tiled, checkpointed and offloaded.
    """
    kind = KINDS[name]
    plain = on_ranks.once(run, "ddp" if kind.alike else engine, "trainer" if kind.options else "fabric", name, False)
    for (true, true_val), (found, val) in zip(plain, on_ranks(run, engine, loop, name, True), strict=True):
        assert true[-1] != true[0]
        assert found == near(true)
        assert val == near(true_val)
