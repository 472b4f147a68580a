"""FSDP and FSDP2: a wrapped model that other stages and trainers use, and methods that use weights of the root unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

import lt_tiled
from tests.engines.cells import launch, strategy
from tests.engines.test_matrix import HoldsWeights
from tests.lit import Ids, replaced, trainer
from tests.parity import near
from tests.world import World


def all_stages(engine: str) -> tuple[Any, ...]:
    """Fit, validate, predict and fit again with one model and one trainer, which clips gradients."""
    module = HoldsWeights(tiled_loss=True)
    options = {"devices": dist.get_world_size(), "max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0}
    run = trainer(strategy(lt_tiled, engine, tiling=4), gradient_clip_val=0.5, **options)
    run.fit(module)
    run.validate(module, verbose=False)
    predicted = torch.cat(run.predict(module))
    run.fit_loop.max_epochs = 2
    run.fit(module)
    return module.losses, module.val_losses, predicted, replaced(module)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
def test_all_stages(engine: str, world: World) -> None:
    """One model goes through ``fit``, ``validate``, ``predict`` and ``fit`` as under DDP, though the engine has wrapped
    it by then, and uses weights that it holds itself in each of them.
    """
    for plain, found in zip(world(all_stages, "ddp"), world(all_stages, engine), strict=True):
        assert found[0] == near(plain[0])
        assert found[1] == near(plain[1])
        torch.testing.assert_close(found[2], plain[2], rtol=1e-5, atol=1e-5)
        assert found[3] == 0


class ShardsItself(HoldsWeights):
    """Makes itself the root unit, as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule) and self.device_mesh is not None:
            for module in (*self.blocks, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])


def losses_of(engine: str, kind: type[HoldsWeights]) -> list[float]:
    module = kind(tiled_loss=True)
    trainer(strategy(lt_tiled, engine, tiling=4), devices=dist.get_world_size()).fit(module)
    return module.losses


def test_a_module_that_shards_itself(world: World) -> None:
    """Under FSDP2 a ``configure_model`` that chooses the units itself has DDP's losses."""
    plain = world(losses_of, "ddp", HoldsWeights)
    assert world(losses_of, "fsdp2", ShardsItself) == [near(losses) for losses in plain]


def steps(engine: str, method: str) -> tuple[list[float], list[float], Tensor]:
    """Three steps by a registered method or a step of a LightningModule, then a validation and a prediction."""
    fabric, module = launch(engine, tiling=4), HoldsWeights(tiled_loss=True)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 1.0, momentum=0.9))
    register_fsdp_forward_method(module, "loss")
    model.mark_forward_method("loss")  # as DDP needs it
    losses = []
    for index in range(3):
        ids = torch.stack([Ids()[2 * index], Ids()[2 * index + 1]])
        loss = model.loss(ids) if method == "loss" else model.training_step(ids, index)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        model.validation_step(ids, 0)
        hidden = model(ids)
    fabric.strategy.release()
    return losses, module.val_losses, hidden


@pytest.mark.parametrize("method", ["loss", "training_step"])
def test_registered_methods(method: str, world: World) -> None:
    """Under FSDP2 in Fabric, registered methods and steps of a LightningModule use weights that the module holds."""
    for plain, found in zip(world(steps, "ddp", method), world(steps, "fsdp2", method), strict=True):
        assert found[0] == near(plain[0])
        assert found[1] == near(plain[1])
        torch.testing.assert_close(found[2], plain[2], rtol=1e-5, atol=1e-5)
