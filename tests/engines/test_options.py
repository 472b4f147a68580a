"""What a run may ask for besides its engine: precision, accumulation and clipping."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_tiled
from tests.engines.cells import ENGINES, in_trainer, policies, seen, strategy, whole_weights
from tests.engines.conftest import OnRanks
from tests.lit import Ids, LitTiny, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import errors, more_than, near

SEQUENCES = torch.stack([Ids()[index] for index in range(4)]).view(2, 2, -1)
RATE = 2.0**20
"""A learning rate with which an SGD step leaves weights that are the gradients: also in bfloat16 it rounds away the
weights of before."""


class OneStep(LitTiny):
    """Trains with plain SGD, on the two sequences of each rank."""

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return super().training_step(SEQUENCES[self.global_rank], index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), RATE)


class Weights(pl.Callback):
    """Gathers all weights before and after the training, and reads the tiles and the bytes that went to the disk."""

    def on_train_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        self.before = whole_weights(run.model, module.net)

    def on_train_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        self.after = whole_weights(run.model, module.net)
        self.tiles, _, self.disk_bytes = seen(run.strategy)


def gradient_errors(engine: str, mode: str, directory: str, precision: str) -> tuple[dict[str, float], list[int], int]:
    """Return the errors of one step's gradients against float64 on one process, the tiles, and the bytes on disk."""
    model, weights = OneStep(), Weights()
    run = trainer(
        strategy(lt_tiled, engine, **policies(mode, directory)),
        devices=dist.get_world_size(),
        precision=precision,
        callbacks=[weights],
        max_steps=1,
        limit_val_batches=0,
    )
    run.fit(model)
    exact = TinyLM().double()
    exact.load_state_dict(weights.before)
    ids = SEQUENCES.flatten(0, 1)
    lm_loss(exact(ids), ids).backward()
    found = {name: (weights.before[name] - after) / RATE for name, after in weights.after.items()}
    return (
        errors(found, {name: weight.grad for name, weight in exact.named_parameters()}),
        weights.tiles,
        weights.disk_bytes,
    )


@pytest.mark.table("(ddp|fsdp2|zero1|zero3)-bf16-true|(fsdp|fsdp_flat|zero2)-bf16-mixed")
@pytest.mark.low_precision
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_precision(engine: str, precision: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """In 16 bits the gradients are as near to float64 as the untiled run's on the same engine."""
    untiled = on_ranks(gradient_errors, engine, "untiled", "", precision)
    tiled = on_ranks(gradient_errors, engine, "disk", str(tmp_path), precision)
    for (plain, _, _), (found, tiles, disk_bytes) in zip(untiled, tiled, strict=True):
        assert more_than(found, plain, torch.bfloat16) == {}
        assert tiles == [4, 4]
        assert disk_bytes > 0


@pytest.mark.table("(ddp|fsdp2|zero3)-accumulation|(fsdp_flat|zero1)-clipping")
@pytest.mark.parametrize(
    "kwargs", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=["accumulation", "clipping"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_steps(engine: str, kwargs: dict[str, Any], on_ranks: OnRanks, tmp_path: Path) -> None:
    """Gradient accumulation, and clipping by the norm over all ranks, train as plain DDP does, or as DeepSpeed
    accumulates untiled.
    """
    like = engine if engine.startswith("zero") and "accumulate_grad_batches" in kwargs else "ddp"
    plain = on_ranks.once(partial(in_trainer, built=True, max_steps=2, **kwargs), like, "untiled", "")
    tiled = on_ranks(partial(in_trainer, built=True, max_steps=2, **kwargs), engine, "disk", str(tmp_path))
    assert [r.losses for r in tiled] == [near(r.losses) for r in plain]
    free = on_ranks.once(partial(in_trainer, built=True, max_steps=2), engine, "untiled", "")
    assert [r.losses for r in tiled] != [r.losses for r in free]  # the option did something
