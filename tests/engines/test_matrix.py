"""Every engine, in Trainer and in Fabric, trains on two ranks as it does untiled, whatever is tiled, checkpointed and
offloaded; with either Lightning package, by a registered name, and with any arguments of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap

import lt_tiled
from lt_tiled import tiled_linear_cross_entropy
from lt_tiled.callbacks import Tiled
from tests.engines.cells import ENGINES, MODES, SHARDED, Look, Ran, in_fabric, in_trainer, strategy
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny, Tiny, trainer
from tests.models import Block, GatedMLP, TinyLM, lm_loss
from tests.parity import near
from tests.world import World

pytestmark = pytest.mark.self_checks


def in_other_trainer(engine: str, mode: str, directory: str) -> Ran:
    """The same in the Trainer of ``pytorch_lightning``."""
    import pytorch_lightning

    import lt_tiled.pytorch_lightning as home

    kinds = {
        "module": type("LitTiny", (Tiny, pytorch_lightning.LightningModule), {}),
        "observer": type("Look", (Look, pytorch_lightning.Callback), {}),
    }
    return in_trainer(engine, mode, directory, home=home, kind=pytorch_lightning.Trainer, **kinds)


LOOPS = {"trainer": in_trainer, "fabric": in_fabric, "pytorch_lightning": in_other_trainer}


@pytest.mark.table(
    "trainer-.*-loss|fabric-(ddp|fsdp2|zero3)-loss|(trainer|fabric)-ddp-.*|fabric-(fsdp|zero2)-tiled"
    "|pytorch_lightning-(fsdp2|zero2)-loss"
)
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_are_the_untiled_ones(loop: str, engine: str, mode: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Losses of several optimizer steps and of validation equal the untiled run's, on sequences of unequal length in
    Fabric, and no file is left.
    """
    if loop == "pytorch_lightning":
        pytest.importorskip(loop)
    untiled = on_ranks.once(LOOPS[loop], engine, "untiled", "")
    tiled = on_ranks(LOOPS[loop], engine, mode, str(tmp_path))
    shards = (5, 2) if loop == "fabric" else (4, 4)
    for plain, found, count in zip(untiled, tiled, shards, strict=True):
        assert len(plain.losses) >= 3
        assert plain.losses[-1] != plain.losses[0]
        assert found.losses == near(plain.losses)
        assert found.val_losses == near(plain.val_losses)
        assert (plain.tiles, plain.blocks) == ([], 0)
        assert found.tiles == [count] * 2
        assert found.blocks == (0 if mode == "tiled" else 2)
        assert (found.disk_bytes > 0) == (mode == "loss")
        assert found.left == 0
    assert list(tmp_path.iterdir()) == []


class HoldsWeights(LitTiny):
    """Has no ``configure_model`` and no hook for engines, as most LightningModules, and weights of its own: a position
    embedding, and a tied head whose weight its steps use.
    """

    configure_model = pl.LightningModule.configure_model

    def __init__(self, tiled_loss: bool = False) -> None:
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


@pytest.mark.table("zero3|fsdp|fsdp2")
@pytest.mark.parametrize("engine", SHARDED)
def test_engines_agree(engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """A sharded engine with everything on has the losses of DDP with everything off, with a LightningModule that knows
    nothing of engines and holds weights itself.
    """
    run = partial(in_trainer, module=HoldsWeights)
    mode = "disk" if engine == "zero3" else "loss"  # its steps do not see the head's weight
    plain, sharded = on_ranks.once(run, "ddp", "untiled", ""), on_ranks(run, engine, mode, str(tmp_path))
    assert [(r.losses, r.val_losses) for r in sharded] == [(near(r.losses), near(r.val_losses)) for r in plain]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.mark.table("trainer-(fsdp2|zero3)|fabric-(ddp|zero3)")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", ["trainer", "fabric"])
def test_one_device(loop: str, engine: str, one_rank: World, tmp_path: Path) -> None:
    """Every engine runs in a single process, ZeRO-3 too, with the losses of plain training."""
    alike = {"built": True} if loop == "trainer" else {"accumulate": False}
    (plain,) = one_rank(partial(LOOPS[loop], **alike), "ddp", "untiled", str(tmp_path))
    (tiled,) = one_rank(partial(LOOPS[loop], **alike), engine, "disk", str(tmp_path))
    assert tiled.losses == near(plain.losses)
    assert tiled.disk_bytes > 0


class WrapsByHand(LitTiny):
    """Wraps its blocks in ``configure_model``, in the context that FSDP's strategy gives."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net.blocks = nn.ModuleList(wrap(block) for block in self.net.blocks)


class Sharded(LitTiny):
    """Shards itself in ``configure_model``, as Lightning's own strategy for FSDP2 wants it."""

    def configure_model(self) -> None:
        super().configure_model()
        for module in (*self.net.blocks, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


BY_CALLBACK: dict[str, Any] = {"tiling": None, "activation_checkpointing": None}
ARGUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "callback, ddp": ("ddp", BY_CALLBACK),
    "callback, fsdp": ("fsdp", BY_CALLBACK),
    "callback, zero3": ("zero3", BY_CALLBACK),
    "callback, stock fsdp2": (ModelParallelStrategy, {"data_parallel_size": 2, "tensor_parallel_size": 1}),
    "tiled_fsdp2": ("tiled_fsdp2", {}),
    "tiled_deepspeed_stage_3_offload": ("tiled_deepspeed_stage_3_offload", {}),
    "ddp, unused allowed": ("ddp", {"find_unused_parameters": True}),
    "ddp, static graph": ("ddp", {"static_graph": True}),
    "ddp, bucket view": ("ddp", {"gradient_as_bucket_view": True}),
    "fsdp, policy of blocks": ("fsdp", {"auto_wrap_policy": {Block}}),
    "fsdp, policy of tiled modules": ("fsdp", {"auto_wrap_policy": ModuleWrapPolicy({GatedMLP})}),
    "fsdp, policy of norms": ("fsdp", {"auto_wrap_policy": {nn.LayerNorm}, "tiling": False}),
    "fsdp, gradients only": ("fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}),
    "fsdp, no sharding": ("fsdp", {"sharding_strategy": "NO_SHARD"}),
    "fsdp, cpu offload": ("fsdp", {"cpu_offload": True}),
    "fsdp, by hand": ("fsdp", {}),
    "fsdp, own checkpointing": ("fsdp", {"activation_checkpointing_policy": {Block}}),
}
"""Registered names, and arguments of an engine's own."""


def losses_with(_: str, name: str) -> list[float]:
    chosen, options = ARGUMENTS[name]
    module: Any = {"fsdp, by hand": WrapsByHand, "callback, stock fsdp2": Sharded}.get(name, LitTiny)()
    if "zero3" in name or "deepspeed" in name:  # whose contexts draw weights of their own
        module.configure_model()
    if not isinstance(chosen, str):
        chosen = chosen(**options)
    elif not chosen.startswith("tiled"):
        chosen = strategy(lt_tiled, chosen, **{"tiling": 4, **options})
    callbacks = [Tiled(4, None)] if "callback" in name else []
    trainer(chosen, devices=dist.get_world_size(), callbacks=callbacks).fit(module)
    assert options.get("tiling") is False or module.forwards_replaced == {6}
    return module.losses


@pytest.mark.table(
    "callback, (ddp|stock fsdp2|zero3)|tiled_.*|ddp, static graph"
    "|fsdp, (policy of norms|cpu offload|by hand|own checkpointing)"
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, on_ranks: OnRanks) -> None:
    """``Trainer(strategy=name)`` tiles, the callback tiles beside any strategy, Lightning's own FSDP2 too, and an
    engine's own arguments work, on the CPU as well: losses are DDP's.
    """
    plain = on_ranks.once(losses_with, "ddp", "ddp, unused allowed")
    found = on_ranks(losses_with, "zero3" if "deepspeed" in name or "zero3" in name else "ddp", name)
    assert found == [near(losses) for losses in plain]
