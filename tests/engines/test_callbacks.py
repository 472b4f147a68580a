"""``TiledMLP`` beside the strategy of an engine, after it has wrapped the model."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import lt_tiled
from lt_tiled.callbacks import TiledMLP
from tests.engines.cells import error_of, strategy
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny, replaced, trainer
from tests.parity import near
from tests.world import World


def callback_refused(engine: str) -> tuple[str, str, int]:
    module = LitTiny()
    chosen = strategy(lt_tiled, engine, tiling=None, activation_checkpointing=None)
    run = trainer(chosen, devices=dist.get_world_size(), callbacks=[TiledMLP(4)])
    return *error_of(lambda: run.fit(module)), replaced(module)


def test_callback_under_zero3(deepspeed_world: World) -> None:
    """The callback comes too late for ZeRO-3 to gather a tiled module as a whole, and says so before the first step."""
    for kind, text, left in deepspeed_world(callback_refused, "zero3"):
        assert kind == "ValueError"
        assert "a callback runs too late" in text
        assert left == 0


class Sharded(LitTiny):
    """Shards itself in ``configure_model``, as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def with_callback(engine: str, tiled: bool) -> list[float]:
    if engine == "stock fsdp2":
        module, chosen = Sharded(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    else:
        module, chosen = LitTiny(), strategy(lt_tiled, engine, tiling=None, activation_checkpointing=None)
    trainer(chosen, devices=dist.get_world_size(), callbacks=[TiledMLP(4)] if tiled else []).fit(module)
    assert module.forwards_replaced == ({6} if tiled else {0})
    return module.losses


@pytest.mark.table("ddp|stock fsdp2|zero2")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp2", "stock fsdp2", "zero1", "zero2"])
def test_callback(engine: str, on_ranks: OnRanks) -> None:
    """``TiledMLP`` tiles behind any other engine, Lightning's own FSDP2 too, after that has wrapped the model."""
    plain = on_ranks(with_callback, engine, False)
    assert on_ranks(with_callback, engine, True) == [near(losses) for losses in plain]
