"""The Trainer strategies in one process."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator as FabricCPUAccelerator
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lt_tiled
from lt_tiled import (
    ActivationCheckpointing,
    TiledDDPStrategy,
    TiledDeepSpeedStrategy,
    TiledFSDPStrategy,
    TiledModelParallelStrategy,
    TiledSingleDeviceStrategy,
    Tiling,
)
from lt_tiled.callbacks import Tiled
from tests.lit import LitTiny, replaced, trainer
from tests.parity import near


def tiled(**kwargs: Any) -> TiledSingleDeviceStrategy:
    return TiledSingleDeviceStrategy(**{"tiling": 4, "activation_checkpointing": True, **kwargs})


@pytest.mark.parametrize("by", ["strategy", "callback"])
def test_all_stages(by: str) -> None:
    """Our strategy, and the callback beside a stock one, serve fit, validate and predict. Losses and predictions are
    those of the stock strategy. Modules are marked in each step, and plain after each stage and after an exception.
    """

    def run_of() -> Any:
        return trainer(tiled()) if by == "strategy" else trainer("auto", callbacks=[Tiled(4, True)])

    plain, model, run = LitTiny(), LitTiny(), run_of()
    trainer("auto").fit(plain)
    run.fit(model)
    assert model.losses == near(plain.losses)
    assert model.val_losses == near(plain.val_losses)
    assert model.forwards_replaced == {6}
    assert replaced(model) == 0
    run.validate(model, verbose=False)
    assert replaced(model) == 0
    predictions = run.predict(model)
    assert replaced(model) == 0
    expected = trainer("auto").predict(model)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(predictions, expected, strict=True))
    model.steps_fail_at = 1
    with pytest.raises(ArithmeticError, match="the step failed"):
        run_of().fit(model)
    assert replaced(model) == 0


def test_registered_names() -> None:
    """``strategy="tiled"`` and the other names are known after ``import lt_tiled``, in any case of letters: those of
    Lightning behind ``tiled_``, with its arguments.
    """
    assert isinstance(trainer("tiled").strategy, TiledSingleDeviceStrategy)
    assert isinstance(trainer("Tiled_DDP").strategy, TiledDDPStrategy)
    assert isinstance(trainer("tiled_fsdp_cpu_offload").strategy, TiledFSDPStrategy)
    assert isinstance(trainer("tiled_fsdp2").strategy, TiledModelParallelStrategy)
    assert trainer("tiled_ddp_notebook").strategy._start_method == "fork"
    assert trainer("tiled_deepspeed").strategy.config["zero_optimization"]["stage"] == 2
    offload = trainer("tiled_deepspeed_stage_3_offload").strategy.config
    assert {"offload_optimizer", "offload_param"} <= set(offload["zero_optimization"])


def test_short_forms() -> None:
    """A bare number is a shard count, ``True`` the default policy, the name of a place where it offloads; ``None`` and
    ``False`` turn a feature off; both are on by default.
    """
    assert TiledDDPStrategy(tiling=8).tiling == Tiling(8)
    assert TiledDDPStrategy(tiling=None).tiling is TiledDDPStrategy(tiling=False).tiling is None
    assert TiledDDPStrategy(tiling=True).tiling == Tiling()
    assert TiledDDPStrategy(activation_checkpointing=True).activation_checkpointing == ActivationCheckpointing()
    assert TiledDDPStrategy(activation_checkpointing=False).activation_checkpointing is None
    offloaded = TiledDDPStrategy(activation_checkpointing="cpu+disk").activation_checkpointing
    assert offloaded == ActivationCheckpointing(offload="cpu+disk")
    assert (TiledDDPStrategy().tiling, TiledDDPStrategy().activation_checkpointing) == (
        Tiling(),
        ActivationCheckpointing(),
    )


def test_deepspeed_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deepspeed its strategy says so; that the others and the package do not need it is tested in
    ``tests/test_import.py``.
    """
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed._DEEPSPEED_AVAILABLE", False)
    with pytest.raises(MisconfigurationException, match="must have DeepSpeed installed"):
        TiledDeepSpeedStrategy()


def test_parents_arguments() -> None:
    """All arguments of the parents are accepted, and passed on."""
    for ours, theirs in ((TiledDDPStrategy, DDPStrategy), (TiledSingleDeviceStrategy, SingleDeviceStrategy)):
        names = [n for n, p in inspect.signature(theirs).parameters.items() if p.kind is not p.VAR_KEYWORD]
        ours(**dict.fromkeys(n for n in names if n not in ("timeout", "start_method", "device")))
    assert TiledDDPStrategy(find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}


def test_the_device_follows_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single-device strategies take the accelerator's device, where the stock one stays on the CPU."""
    meta = torch.device("meta")
    for kind in (CPUAccelerator, FabricCPUAccelerator):
        monkeypatch.setattr(kind, "get_parallel_devices", staticmethod(lambda devices: [meta]))
    assert trainer(tiled()).strategy.root_device == trainer("tiled").strategy.root_device == meta
    in_fabric = lt_tiled.fabric.TiledSingleDeviceStrategy()
    assert Fabric(accelerator="cpu", devices=1, strategy=in_fabric).device == meta
    assert trainer(SingleDeviceStrategy()).strategy.root_device == torch.device("cpu")


def test_several_devices_are_refused() -> None:
    """The single-device strategy with two devices says which strategy to take, before anything runs."""
    with pytest.raises(ValueError, match=r"TiledSingleDeviceStrategy runs on one device and was given 2.*tiled_ddp"):
        trainer(tiled(), devices=2).fit(LitTiny())


def test_what_stops_before_the_first_step() -> None:
    """A directory that is not there stops the run before its first step, and leaves the model as it was."""
    model = LitTiny()
    offload = ActivationCheckpointing(offload="disk", directory="/not/there")
    with pytest.raises(lt_tiled.OffloadError, match="in '/not/there': No such file or directory"):
        trainer(tiled(activation_checkpointing=offload)).fit(model)
    assert model.losses == []
    assert replaced(model) == 0


@pytest.mark.parametrize(
    "strategy",
    [getattr(module, name) for module in (lt_tiled.trainer, lt_tiled.fabric) for name in lt_tiled.fabric.__all__],
)
def test_defaults_are_those_of_the_parent(strategy: type) -> None:
    """A strategy with its defaults has the settings of Lightning's own with its defaults."""
    parent = next(base for base in strategy.__mro__ if base.__module__.startswith("lightning."))
    needs_function = "parallelize_fn" in inspect.signature(parent).parameters
    arguments = {"parallelize_fn": lambda model, mesh: model} if needs_function else {}
    settings = vars(strategy(**arguments))
    for name, value in vars(parent(**arguments)).items():
        if isinstance(value, bool | int | float | str | dict | timedelta | None):
            assert settings[name] == value, name


@pytest.mark.parametrize("by", ["trainer", "callback", "fabric"])
def test_a_ranks_share_of_a_budget(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's budget is divided by the ranks that the engine has on it, whatever a launcher says."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    strategy: Any = lt_tiled.fabric.TiledSingleDeviceStrategy() if by == "fabric" else TiledSingleDeviceStrategy()
    applies = Tiled() if by == "callback" else strategy
    applies.activation_checkpointing = ActivationCheckpointing(offload="cpu", cpu_budget="1GiB")
    budgets, model = list[int](), LitTiny()
    model.on_train_end = lambda: budgets.append(applies.prepared[0].offloader.cpu.budget)
    if by == "fabric":
        model.configure_model()
        Fabric(accelerator="cpu", devices=1, strategy=strategy).setup_module(model.net)
        model.on_train_end()
        strategy.release()
    elif by == "callback":
        trainer("auto", callbacks=[applies]).fit(model)
    else:
        trainer(strategy).fit(model)
    assert budgets == [2**30]
