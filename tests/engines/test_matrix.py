"""Every engine, in Trainer and in Fabric, trains on two ranks as it does untiled, whatever is tiled, checkpointed and
offloaded.
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
from torch import Tensor

from tests.engines.cells import ENGINES, MODES, SHARDED, in_fabric, in_trainer
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny
from tests.parity import near
from tests.world import World

pytestmark = pytest.mark.self_checks


class BuiltAtOnce(LitTiny):
    """Has no ``configure_model``."""

    configure_model = pl.LightningModule.configure_model

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        LitTiny.configure_model(self)


LOOPS = {"trainer": in_trainer, "fabric": in_fabric}


@pytest.mark.table("trainer-.*-loss|fabric-(ddp|fsdp2|zero3)-loss|.*-ddp-.*|fabric-(fsdp|fsdp2|zero2)-tiled")
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_are_the_untiled_ones(loop: str, engine: str, mode: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Losses of several optimizer steps and of validation equal the untiled run's, on sequences of unequal length in
    Fabric.
    """
    untiled = on_ranks.once(LOOPS[loop], engine, "untiled", "")
    shards = (4, 4) if loop == "trainer" else (5, 2)
    for rank, (plain, tiled) in enumerate(
        zip(untiled, on_ranks(LOOPS[loop], engine, mode, str(tmp_path)), strict=True)
    ):
        assert len(plain.losses) >= 3
        assert plain.losses[-1] != plain.losses[0]
        assert tiled.losses == near(plain.losses)
        assert tiled.val_losses == near(plain.val_losses)
        assert (plain.tiles, plain.blocks) == ([], 0)
        assert tiled.tiles == [shards[rank]] * 2
        assert tiled.blocks == (0 if mode == "tiled" else 2)
        assert (tiled.disk_bytes > 0) == (mode == "loss")
        assert tiled.left == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.table("trainer-(zero3|fsdp|fsdp2)")
@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("loop", LOOPS)
def test_engines_agree(loop: str, engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """A sharded engine with everything on has the losses of DDP with everything off, with a LightningModule that has no
    ``configure_model`` and no hook for engines.
    """
    alike = {"module": BuiltAtOnce} if loop == "trainer" else {"accumulate": False}  # zero.Init draws other weights
    plain = on_ranks.once(partial(LOOPS[loop], **alike), "ddp", "untiled", "")
    sharded = on_ranks(partial(LOOPS[loop], **alike), engine, "loss", str(tmp_path))
    assert [r.losses for r in sharded] == [near(r.losses) for r in plain]


class BuiltFromAnySeed(BuiltAtOnce):
    """Has other weights and another buffer on each rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("shift", torch.full((2,), dist.get_rank(), dtype=torch.complex64), persistent=False)
        for weight in self.parameters():
            weight.data += 0.1 * dist.get_rank()

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = super().training_step(ids, index)
        self.losses[-1] += float(self.shift.real.sum())
        return loss


def test_ranks_that_built_other_weights(world: World) -> None:
    """FSDP2 shards the model of rank 0, with its buffers, as DDP does: losses equal DDP's on both ranks."""
    run = partial(in_trainer, module=BuiltFromAnySeed)
    assert [r.losses for r in world(run, "fsdp2", "tiled", "")] == [
        near(r.losses) for r in world(run, "ddp", "untiled", "")
    ]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.mark.table("trainer-fsdp2|fabric-(ddp|zero3)")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", LOOPS)
def test_one_device(loop: str, engine: str, one_rank: World, tmp_path: Path) -> None:
    """Every engine runs on one device, ZeRO-3 too, with the losses of plain training."""
    alike = {"built": True} if loop == "trainer" else {"accumulate": False}
    (plain,) = one_rank(partial(LOOPS[loop], **alike), "ddp", "untiled", str(tmp_path))
    (tiled,) = one_rank(partial(LOOPS[loop], **alike), engine, "disk", str(tmp_path))
    assert tiled.losses == near(plain.losses)
    assert tiled.disk_bytes > 0
