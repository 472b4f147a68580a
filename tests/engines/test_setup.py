"""What is refused at setup, before the first step."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lt_tiled
from tests.engines.cells import error_of, strategy
from tests.engines.conftest import OnRanks
from tests.lit import Ids, LitTiny, replaced, trainer
from tests.models import TinyLM, lm_loss
from tests.world import World


class ShardsInside(LitTiny):
    """Its ``configure_model`` makes the gate projection a unit of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block.mlp.gate, mesh=self.device_mesh["data_parallel"])
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TiesBlocks(LitTiny):
    """Two blocks share a weight."""

    def configure_model(self) -> None:
        super().configure_model()
        first, second = self.net.blocks
        second.mlp.down.weight = first.mlp.down.weight


class TiesHead(LitTiny):
    """A block shares a weight with what is outside of the blocks."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale = self.net.blocks[0].norm1.weight


def widens(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Choose the first projections of MLPs as FSDP units."""
    return recurse or (isinstance(module, nn.Linear) and module.out_features > module.in_features)


def fit_refused(engine: str, model: type[LitTiny], options: dict[str, Any]) -> tuple[str, str, int]:
    module = model()
    kind, text = error_of(
        lambda: trainer(strategy(lt_tiled, engine, tiling=4, **options), devices=dist.get_world_size()).fit(module)
    )
    assert module.losses == []
    return kind, text, replaced(module)


@pytest.mark.parametrize(
    ("engine", "model", "options", "message"),
    [
        (
            "fsdp",
            LitTiny,
            {"auto_wrap_policy": widens},
            r"net.blocks.0.mlp \(GatedMLP\) is tiled, and gate inside it is an FSDP unit",
        ),
        ("fsdp2", ShardsInside, {}, r"net.blocks.0.mlp \(GatedMLP\) is tiled, and gate inside it is an FSDP unit"),
        ("fsdp2", TiesBlocks, {}, "Blocks of TiesBlocks share a weight with each other"),
        ("fsdp2", TiesHead, {}, "Blocks of TiesHead share a weight"),
    ],
)
def test_trainer_refuses(
    engine: str, model: type[LitTiny], options: dict[str, Any], message: str, on_ranks: OnRanks
) -> None:
    """A unit inside a tiled module, by policy or by hand, and weights that two units share, raise before a step.

    The model is restored.
    """
    for kind, text, left in on_ranks(fit_refused, engine, model, options):
        assert kind == "ValueError"
        assert re.search(message, text)
        assert "auto_wrap_policy={MyBlock}" in text or "FSDP unit" not in text
        assert left == 0


class TwoNetworks(LightningModule):
    """Steps twice, each time on another network, with a backward pass of its own."""

    def __init__(self, shards: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.shards = shards
        self.losses: list[float] = []
        self.first, self.second = TinyLM(), TinyLM()

    def configure_model(self) -> None:
        if self.shards:
            fully_shard(self.first, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.second, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(network.parameters(), 0.1) for network in (self.first, self.second)]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Ids(4))

    def training_step(self, ids: Tensor, index: int) -> None:
        for network, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            loss = lm_loss(network(ids), ids)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(float(loss.detach()))


def two_networks(shards: bool) -> tuple[str, str]:
    module, said = TwoNetworks(shards), io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("lt_tiled").addHandler(handler)
    kind, _ = error_of(lambda: trainer(strategy(lt_tiled, "fsdp2"), devices=dist.get_world_size()).fit(module))
    logging.getLogger("lt_tiled").removeHandler(handler)
    return kind, said.getvalue()


def test_several_backward_passes_in_a_step(world: World) -> None:
    """Under FSDP2 a module that shards its networks may run several backward passes in a step; another is told to."""
    for kind, said in world(two_networks, True):
        assert (kind, "FSDP root" in said) == ("", False)
    said = world(two_networks, False)[0][1]  # rank 0 logs
    assert "for several in a step, call fully_shard on each network in configure_model" in said
