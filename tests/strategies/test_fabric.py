"""The Fabric strategies in one process."""

from __future__ import annotations

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY

import lt_tiled
from lt_tiled.callbacks import Tiled
from lt_tiled.fabric import TiledSingleDeviceStrategy
from tests.lit import replaced
from tests.models import TinyLM


def test_registered_names() -> None:
    """Fabric's own names are known behind ``tiled_``, and are classes of ``lt_tiled.fabric``."""
    names = [name for name in STRATEGY_REGISTRY.available_strategies() if name.startswith("tiled")]
    assert {"tiled", "tiled_ddp", "tiled_fsdp", "tiled_fsdp2", "tiled_deepspeed_stage_3"} <= {*names}
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
