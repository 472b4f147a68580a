"""FSDP2 with the user's module as the root unit: weights that it holds itself, in all of its steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import lt_tiled
from lt_tiled import tiled_linear_cross_entropy
from lt_tiled.callbacks import Tiled
from tests.lit import Ids, LitTiny, replaced, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import near
from tests.world import World


class HoldsWeights(LitTiny):
    """Holds a position embedding and the parts of its network itself, and uses its head's weight in its steps."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.test_losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        net = TinyLM()
        self.embed, self.blocks, self.head = net.embed, net.blocks, net.head
        self.position = nn.Parameter(torch.randn(24, 16))
        if self.tied:
            self.head.weight = self.embed.weight
        self.net = self.predict_step

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, ids: Tensor) -> Tensor:
        return tiled_linear_cross_entropy(self(ids), self.head.weight, ids, num_shards=3, shift=True)

    def training_step(self, ids: Tensor) -> dict[str, Tensor]:
        self.forwards_replaced.add(replaced(self))
        loss = self.loss(ids)
        self.losses.append(float(loss.detach()))
        return {"loss": loss}

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.val_losses.append(float(self.loss(ids)))

    def test_step(self, ids: Tensor, index: int) -> Tensor:
        loss = lm_loss(self.predict_step(ids), ids)
        self.test_losses.append(float(loss))
        return loss

    def predict_step(self, ids: Tensor, index: int = 0) -> Tensor:
        return self.head(self.forward(ids))

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Ids(2), batch_size=2)


class ShardsItself(HoldsWeights):
    """Makes itself the root unit, as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        first = self.net is None
        super().configure_model()
        if first and self.device_mesh is not None:
            for module in (*self.blocks, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])


class BuiltAtOnce(HoldsWeights):
    """Has no ``configure_model`` and knows nothing of engines, as most LightningModules."""

    configure_model = pl.LightningModule.configure_model

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied)
        self.build()


def all_stages(strategy: Any, devices: int, kind: type[HoldsWeights], tied: bool) -> tuple[Any, ...]:
    """Fit, validate, test, predict and fit again; each rank gets every batch."""
    module = kind(tied)
    run = trainer(
        strategy, devices=devices, max_epochs=1, max_steps=-1, use_distributed_sampler=False, gradient_clip_val=0.5
    )
    run.fit(module)
    run.validate(module, verbose=False)
    run.test(module, verbose=False)
    predictions = run.predict(module)
    run.fit_loop.max_epochs = 2
    run.fit(module)
    if devices > 1:
        assert isinstance(module, FSDPModule)
        assert isinstance(module.blocks[0], FSDPModule)
        assert module.forwards_replaced == {6}
        assert not hasattr(module.training_step.__wrapped__, "__wrapped__")  # registered once
        assert "configure_model" not in vars(module)
    return module.losses, module.val_losses, module.test_losses, torch.cat(predictions)


def on_fsdp2(kind: type[HoldsWeights], tied: bool) -> tuple[Any, ...]:
    return all_stages(lt_tiled.TiledModelParallelStrategy(tiling=4), 2, kind, tied)


@pytest.mark.table("BuiltAtOnce-True")
@pytest.mark.parametrize(
    ("kind", "tied"), [(HoldsWeights, False), (HoldsWeights, True), (ShardsItself, False), (BuiltAtOnce, True)]
)
def test_trainer(kind: type[HoldsWeights], tied: bool, world: World) -> None:
    """Training, validation, test and prediction are those of one untiled process, also in a second fit."""
    expected = all_stages("auto", 1, HoldsWeights, tied)
    assert len(expected[0]) == 8
    assert expected[0][-1] != expected[0][0]
    for *losses, predictions in world(on_fsdp2, kind, tied):
        for found, plain in zip(losses, expected, strict=False):
            assert found == near(plain)
        torch.testing.assert_close(predictions, expected[-1], rtol=1e-5, atol=1e-5)


def steps(strategy: Any, devices: int, method: str, **kwargs: Any) -> tuple[list[float], list[float], Tensor]:
    """Three steps by a marked method or a step of a LightningModule, then a validation and a prediction."""
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, **kwargs)
    fabric.launch()
    module = BuiltAtOnce()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 1.0, momentum=0.9))
    for marked in ("loss", module.predict_step):
        model.mark_forward_method(marked)
    losses = []
    for index in range(3):
        ids = torch.stack([Ids()[2 * index], Ids()[2 * index + 1]])
        loss = model.loss(ids) if method == "loss" else model.training_step(ids)["loss"]
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        model.validation_step(ids, 0)
        model.test_step(ids, 0)
        hidden, logits = model(ids), model.predict_step(ids)
    assert hidden.shape == (2, 24, 16)
    if hasattr(fabric.strategy, "release"):
        fabric.strategy.release()
    return losses, [*module.val_losses, *module.test_losses], logits


def in_fabric(method: str, by_callback: bool) -> tuple[list[float], list[float], Tensor]:
    chosen = lt_tiled.fabric.TiledModelParallelStrategy(tiling=None if by_callback else 4)
    return steps(chosen, 2, method, callbacks=[Tiled(4, None)] if by_callback else [])


@pytest.mark.parametrize(("method", "by_callback"), [("loss", False), ("training_step", False), ("loss", True)])
def test_fabric(method: str, by_callback: bool, world: World) -> None:
    """Marked methods and the steps of a LightningModule use weights that the module holds, as in one process."""
    losses, val_losses, logits = steps("auto", 1, method)
    assert losses[-1] != losses[0]
    for found, val_found, predicted in world(in_fabric, method, by_callback):
        assert found == near(losses)
        assert val_found == near(val_losses)
        torch.testing.assert_close(predicted, logits, rtol=1e-5, atol=1e-5)
