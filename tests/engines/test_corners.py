"""Corners of single engines that the other files do not reach."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lt_tiled
from lt_tiled.callbacks import TiledMLP
from lt_tiled.lm import CausalLM
from tests.engines.cells import draw, set_up, strategy, train
from tests.engines.conftest import OnRanks
from tests.engines.test_names import Words
from tests.engines.test_setup import error_of, tensor_parallel
from tests.lit import LitTiny, trainer
from tests.models import GatedMLP, RoutedMLP, TinyLM, tiny_llama
from tests.parity import near
from tests.world import World


def unequal_tilings() -> tuple[str, str]:
    def set_up_one() -> None:
        chosen = lt_tiled.fabric.TiledModelParallelStrategy(
            tensor_parallel, tensor_parallel_size=2, tiling=(4, 2)[dist.get_rank()]
        )
        fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
        fabric.launch()
        fabric.setup_module(TinyLM())

    return error_of(set_up_one)


def test_unequal_tilings_of_a_tensor_parallel_group(world: World) -> None:
    """Ranks that would wait for each other in different tiles are refused at setup, on each of them."""
    for kind, text in world(unequal_tilings):
        assert kind == "ValueError"
        assert "communicate in every tile and have different tilings" in text


def save_twice(path: str) -> list[str]:
    """A sharded checkpoint, then a full one of the weights but the head at the same place; the keys of the latter."""
    for kind, chosen in (("sharded", None), ("full", {"model": _no_head})):
        fabric = Fabric(
            accelerator="cpu", devices=2, strategy=strategy(lt_tiled.fabric, "fsdp", tiling=4, state_dict_type=kind)
        )
        fabric.launch()
        model, optimizer = set_up(fabric, TinyLM(), "fsdp")
        train(fabric, model, optimizer, [draw((2, 24), 0)])
        fabric.save(path, {"model": model, "optimizer": optimizer, "mine": {"step": 1}}, filter=chosen)
        fabric.strategy.release()
    saved = torch.load(path, weights_only=False)
    assert saved["mine"] == {"step": 1}
    return sorted(saved["model"])


def _no_head(name: str, value: Any) -> bool:
    return "head" not in name


def test_full_over_sharded_with_a_filter(world: World, tmp_path: Path) -> None:
    """On the CPU, FSDP's full checkpoint takes the place of a sharded one, and leaves out what the filter leaves
    out.
    """
    expected = sorted(name for name in TinyLM().state_dict() if _no_head(name, None))
    assert world(save_twice, str(tmp_path / "model.ckpt")) == [expected] * 2


class Pretrained(CausalLM):
    """Gathers a weight before the first step."""

    def on_train_start(self) -> None:
        import deepspeed

        weight = self.model.model.layers[1].mlp.up_proj.weight
        with deepspeed.zero.GatheredParameters([weight]):
            self.seen = weight.detach().clone()


def from_pretrained(path: str) -> Tensor:
    model = Pretrained(path=path)
    trainer("tiled_deepspeed_stage_3", devices=2, max_steps=1).fit(
        model, torch.utils.data.DataLoader(Words(), batch_size=1)
    )
    return model.seen


def test_pretrained_weights_under_zero3(deepspeed_world: World, tmp_path: Path) -> None:
    """A model from a local directory has its weights when ZeRO-3 builds it sharded."""
    torch.manual_seed(3)
    llama = tiny_llama()
    llama.save_pretrained(tmp_path)
    for weight in deepspeed_world(from_pretrained, str(tmp_path)):
        torch.testing.assert_close(weight, llama.model.layers[1].mlp.up_proj.weight.detach())


def warned(batches: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lt_tiled").addHandler(handler)
    try:
        run = trainer("tiled_deepspeed_stage_1", devices=2, accumulate_grad_batches=batches, max_steps=1)
        run.fit(model := LitTiny())
        run.validate(model, verbose=False)
    finally:
        logging.getLogger("lt_tiled").removeHandler(handler)
    return [message for message in said if "divide the loss" in message]


def test_accumulation_under_deepspeed_is_told(deepspeed_world: World) -> None:
    """That Lightning and DeepSpeed both divide the loss is said once, on rank 0, where gradients are accumulated."""
    assert deepspeed_world(warned, 1) == [[], []]
    (first,), other = deepspeed_world(warned, 2)
    assert "accumulate_grad_batches=2: gradients are 2 times smaller" in first
    assert other == []


def deprecations(engine: str) -> tuple[list[str], list[bool]]:
    """What the functions that DeepSpeed calls warn of in a run; and if they are ignored before, in and after it."""
    said = "`torch.distributed.all_gather_into_tensor` is deprecated."
    ignored: list[bool] = []

    def look() -> None:
        ignored.append(any(kind == "ignore" and text and text.match(said) for kind, text, *_ in warnings.filters))

    class Look(Callback):
        def on_train_end(self, *_: Any) -> None:
            look()

    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()  # a run before may have left its filter, if nothing released its strategy
        warnings.simplefilter("always")
        chosen = strategy(lt_tiled, engine, tiling=4)
        look()
        trainer(chosen, devices=2, callbacks=[Look()]).fit(LitTiny())
        look()
    return [str(warning.message) for warning in caught if "_tensor` is deprecated" in str(warning.message)], ignored


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deprecations_of_deepspeed(engine: str, deepspeed_world: World) -> None:
    """What DeepSpeed calls warns of nothing during a run, and the filter for that is gone after it."""
    assert deepspeed_world(deprecations, engine) == [([], [False, True, False])] * 2


class Sharded(LitTiny):
    """Shards itself in ``configure_model``, as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def stock_fsdp2(tiled: bool) -> list[float]:
    module = Sharded()
    chosen = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer(chosen, devices=2, callbacks=[TiledMLP(4)] if tiled else []).fit(module)
    assert module.forwards_replaced == ({6} if tiled else {0})
    return module.losses


def test_callback_with_lightnings_own_fsdp2(world: World) -> None:
    """``TiledMLP`` beside Lightning's own ``ModelParallelStrategy`` has its losses."""
    assert world(stock_fsdp2, True) == [near(losses) for losses in world(stock_fsdp2, False)]


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = RoutedMLP(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


class Mixture(TinyLM):
    """Its MLPs are mixtures of more experts than four tokens can choose."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = _Routed()


def mixture(engine: str) -> list[float]:
    options = {"find_unused_parameters": True} if engine == "ddp" else {}
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy(lt_tiled.fabric, engine, tiling=2, **options))
    fabric.launch()
    torch.manual_seed(0)
    net = Mixture()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = train(fabric, model, optimizer, (draw((1, 4), 5 * fabric.global_rank + step) for step in range(3)))
    fabric.strategy.release()
    return losses


@pytest.mark.self_checks
def test_ranks_choose_different_experts_under_fsdp2(world: World) -> None:
    """Experts that have tokens on one rank alone train under FSDP2 as under DDP."""
    plain = world(mixture, "ddp")
    assert world(mixture, "fsdp2") == [near(losses) for losses in plain]


class Twice(TinyLM):
    """Runs its blocks twice."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


def run_twice(engine: str, tiled: bool, own: bool) -> list[float]:
    """The losses; ``own`` makes the MLPs leaf modules of ZeRO-3 instead of the blocks."""
    leaves = {"zero3_leaf_modules": False} if own else {}
    chosen = strategy(lt_tiled.fabric, engine, tiling=4 if tiled else None, activation_checkpointing=None, **leaves)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    torch.manual_seed(0)
    net = Twice()
    if own:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(net, [GatedMLP])
    model, optimizer = set_up(fabric, net, engine)
    losses = train(fabric, model, optimizer, [draw((2, 24), dist.get_rank())] * 3)
    fabric.strategy.release()
    return losses


@pytest.mark.parametrize("own", [False, True])
def test_blocks_that_run_twice_under_zero3(own: bool, on_ranks: OnRanks) -> None:
    """Blocks that run twice train in tiles as under DDP, also if the model makes its MLPs leaf modules."""
    plain = on_ranks(run_twice, "ddp", False, False)
    assert on_ranks(run_twice, "zero3", True, own) == [near(losses) for losses in plain]
