"""LightningModules that know nothing of engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.cells import ENGINES, in_trainer
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny
from tests.parity import near
from tests.world import World


class BuiltAtOnce(LitTiny):
    """Has no ``configure_model``."""

    configure_model = pl.LightningModule.configure_model

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        LitTiny.configure_model(self)


@pytest.mark.table("ddp|fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_without_hooks(engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """A LightningModule that builds its model in ``__init__`` and has no hook for engines trains under each of them."""
    untiled = on_ranks.once(partial(in_trainer, built=True), "ddp", "untiled", "")
    tiled = on_ranks(partial(in_trainer, module=BuiltAtOnce), engine, "checkpointed", str(tmp_path))
    for plain, ran in zip(untiled, tiled, strict=True):
        assert ran.losses == near(plain.losses)
        assert ran.tiles == [4, 4]


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
    plain = world(partial(in_trainer, module=BuiltFromAnySeed), "ddp", "untiled", "")
    sharded = world(partial(in_trainer, module=BuiltFromAnySeed), "fsdp2", "tiled", "")
    for expected, found in zip(plain, sharded, strict=True):
        assert found.losses == near(expected.losses)
