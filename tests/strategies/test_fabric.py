"""The Fabric strategies in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lt_tiled
from lt_tiled.callbacks import Tiled
from lt_tiled.fabric import TiledSingleDeviceStrategy
from tests.lit import replaced
from tests.models import TinyLM, lm_loss
from tests.parity import near


def train(strategy: Any, **kwargs: Any) -> tuple[list[float], TinyLM, Fabric]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, **kwargs)
    torch.manual_seed(0)
    net = TinyLM()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = []
    for step in range(3):
        ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(step))
        loss = lm_loss(model(ids), ids)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, net, fabric


@pytest.mark.parametrize("strategy", [TiledSingleDeviceStrategy(tiling=4), "tiled"])
def test_losses_are_the_stock_strategys(strategy: Any) -> None:
    """Losses are those of stock Fabric; the model is marked until the strategy releases it."""
    plain, _, _ = train("auto")
    losses, net, fabric = train(strategy)
    assert losses == near(plain)
    assert replaced(net) == 6
    fabric.strategy.release()
    assert replaced(net) == 0


def test_registered_names() -> None:
    """Every name is known to Fabric too, and is a class of ``lt_tiled.fabric``."""
    names = [name for name in STRATEGY_REGISTRY.available_strategies() if name.startswith("tiled")]
    assert names == [name for name in StrategyRegistry.available_strategies() if name.startswith("tiled")]
    for name in names:
        kind = type(Fabric(strategy=name, accelerator="cpu", devices=1).strategy)
        assert kind is getattr(lt_tiled.fabric, kind.__name__)
        assert str(kind) == f"<class 'lt_tiled.fabric.{kind.__name__}'>"


@pytest.mark.parametrize("by_callback", [False, True])
def test_several_models(by_callback: bool) -> None:
    """Two models of one strategy, or of one callback, are both tiled; setting one up again patches nothing twice; and
    both are restored at the end.
    """
    strategy, callback = TiledSingleDeviceStrategy(tiling=4), Tiled(4, None)
    options = {"callbacks": [callback]} if by_callback else {"strategy": strategy}
    fabric, models = Fabric(accelerator="cpu", devices=1, **options), [TinyLM(), TinyLM()]
    for model in models:
        fabric.setup(model)
    fabric.strategy.setup_module(models[0])
    assert [replaced(model) for model in models] == [6, 6]
    (callback.release if by_callback else strategy.teardown)()
    assert [replaced(model) for model in models] == [0, 0]


def test_the_device_follows_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single-device strategy takes the accelerator's device."""
    monkeypatch.setattr(CPUAccelerator, "get_parallel_devices", staticmethod(lambda devices: [torch.device("meta")]))
    assert Fabric(accelerator="cpu", devices=1, strategy=TiledSingleDeviceStrategy()).device == torch.device("meta")
