"""Modules that hold weights themselves, and models that go through several stages, trainers and engines."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lt_tiled
from lt_tiled import tiled_linear_cross_entropy
from tests.engines.cells import error_of, launch, step_on, strategy
from tests.lit import LitTiny, replaced, sequences, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import near, sgd
from tests.world import OnRanks, World


class HoldsWeights(LitTiny):
    """Has no ``configure_model`` and no hook for engines, as most LightningModules, and weights of its own: a position
    embedding, and a tied head whose weight its steps use.
    """

    configure_model = pl.LightningModule.configure_model

    def __init__(self, tiled_loss: bool = True) -> None:
        super().__init__(tiled_loss=tiled_loss)
        torch.manual_seed(0)
        net = TinyLM()
        self.embed, self.blocks, self.head = net.embed, net.blocks, net.head
        self.position = nn.Parameter(torch.randn(24, 16))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, ids: Tensor) -> Tensor:
        if not self.tiled_loss:
            return lm_loss(self.head(self(ids)), ids)
        return tiled_linear_cross_entropy(self(ids), self.head.weight, ids, num_shards=3, shift=True)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = self.loss(ids)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.val_losses.append(float(self.loss(ids)))

    def predict_step(self, ids: Tensor, index: int) -> Tensor:
        return self.head(self.forward(ids))

    def val_dataloader(self) -> DataLoader[Tensor]:
        # After a single batch, DeepSpeed's next engine dies without tiles too.
        return DataLoader(sequences(12), batch_size=2)


def all_stages(engine: str, tiled: bool) -> tuple[Any, ...]:
    """Validate, fit, predict and fit again with one model and one trainer, which clips gradients. DeepSpeed's engine
    dies in a second fit, without tiles too.
    """
    module = HoldsWeights(tiled_loss=tiled and engine != "zero3")  # under ZeRO-3 its steps do not see the head's weight
    policies: dict[str, Any] = {"tiling": 4} if tiled else {"tiling": None, "activation_checkpointing": None}
    options = {"devices": dist.get_world_size(), "max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0}
    run = trainer(strategy(lt_tiled, engine, **policies), gradient_clip_val=0.5, **options)
    run.validate(module, verbose=False)
    run.fit(module)
    predicted = list[Tensor]()
    if engine != "zero3":
        predicted = run.predict(module)
        run.fit_loop.max_epochs = 2
        run.fit(module)
    assert replaced(module) == 0
    return module.losses, module.val_losses, predicted


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2", "zero3"])
def test_all_stages(engine: str, on_ranks: OnRanks) -> None:
    """One model goes through ``validate``, ``fit``, ``predict`` and ``fit`` as under DDP, though the engine has wrapped
    it by then, and uses weights that it holds itself in each of them.
    """
    plain = on_ranks.once(all_stages, "ddp", False)
    for true, found in zip(plain, on_ranks(all_stages, engine, True), strict=True):
        assert found[0] == near(true[0][: len(found[0])])
        assert found[1] == near(true[1][: len(found[1])])
        for tensor, other in zip(found[2], true[2], strict=engine != "zero3"):
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4)


def steps(engine: str) -> list[float]:
    """Three steps in Fabric by the step of a LightningModule, then a validation."""
    fabric, module = launch(engine, tiling=4), HoldsWeights()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    losses = [step_on(fabric, optimizer, model.training_step(sequences()[index][None], index)) for index in range(3)]
    model.validation_step(sequences()[3][None], 0)
    fabric.strategy.release()
    return losses + module.val_losses


def test_steps_in_fabric(world: World) -> None:
    """Under FSDP2 in Fabric, steps of a LightningModule use weights that the module holds."""
    assert world(steps, "fsdp2") == [near(losses) for losses in world(steps, "ddp")]


class TwoNetworks(LitTiny):
    """Steps twice, each time on another network, with a backward pass of its own."""

    def __init__(self, shards: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.shards = shards
        self.one, self.other = TinyLM(), TinyLM()

    def configure_model(self) -> None:
        for network in (self.one, self.other) if self.shards else ():
            fully_shard(network, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(network.parameters(), 0.1) for network in (self.one, self.other)]

    def training_step(self, ids: Tensor, index: int) -> None:  # type: ignore[override]
        for network, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(lm_loss(network(ids), ids))
            optimizer.step()


@pytest.mark.slow
def test_several_backward_passes_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """Under FSDP2 a module that shards its networks may run several backward passes in a step; another is told to."""
    for shards in (True, False):
        run = trainer(strategy(lt_tiled, "fsdp2"), limit_val_batches=0)
        kind, message = error_of(lambda run=run, shards=shards: run.fit(TwoNetworks(shards)))
        assert not shards or kind == "", message
        said = "for several in a step, call fully_shard on each network in configure_model"
        assert (said in caplog.text) is not shards
