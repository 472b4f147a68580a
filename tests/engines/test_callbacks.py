"""The callback ``Tiled`` beside the strategy of an engine."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import lt_tiled
from lt_tiled.callbacks import Tiled
from tests.engines.cells import strategy
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny, trainer
from tests.parity import near


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
    trainer(chosen, devices=dist.get_world_size(), callbacks=[Tiled(4, None)] if tiled else []).fit(module)
    assert module.forwards_replaced == ({6} if tiled else {0})
    return module.losses


@pytest.mark.table("ddp|stock fsdp2|zero3")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp2", "stock fsdp2", "zero1", "zero2", "zero3"])
def test_callback(engine: str, on_ranks: OnRanks) -> None:
    """The callback tiles before any engine wraps the model, Lightning's own FSDP2 too."""
    plain = on_ranks(with_callback, engine, False)
    assert on_ranks(with_callback, engine, True) == [near(losses) for losses in plain]
