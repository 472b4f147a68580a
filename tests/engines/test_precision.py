"""Gradients in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_tiled
from lt_tiled.verification.steps import full_gradients as full_weights  # of those that train
from tests.engines.cells import ENGINES, policies, strategy
from tests.lit import LitTiny, sequences, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import less_accurate
from tests.world import OnRanks

SEQUENCES = torch.stack(sequences(4)).view(2, 2, -1)
RATE = 2.0**20
"""A learning rate with which an SGD step leaves weights that are the gradients: also in bfloat16 it rounds away the
weights of before."""


class OneStep(LitTiny):
    """Trains with plain SGD, on the two sequences of each rank, and gathers all weights before and after."""

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return super().training_step(SEQUENCES[self.global_rank], index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), RATE)

    def on_train_start(self) -> None:
        self.before = full_weights(self.trainer.model, self.net)

    def on_train_end(self) -> None:
        self.after = full_weights(self.trainer.model, self.net)


def gradients(engine: str, mode: str, directory: str, precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return one step's gradients, and those in float64 on one process."""
    module, chosen = OneStep(), strategy(lt_tiled, engine, **policies(mode, directory))
    options = {"precision": precision, "max_steps": 1, "limit_val_batches": 0}
    trainer(chosen, devices=dist.get_world_size(), **options).fit(module)
    exact = TinyLM().double()
    exact.load_state_dict(module.before)
    ids = SEQUENCES.flatten(0, 1)
    lm_loss(exact(ids), ids).backward()
    found = {name: (module.before[name].double() - after.double()) / RATE for name, after in module.after.items()}
    return found, {name: weight.grad for name, weight in exact.named_parameters()}


@pytest.mark.table("(ddp|fsdp2|zero1|zero3)-bf16-true|(fsdp|fsdp_flat|zero2)-bf16-mixed")
@pytest.mark.low_precision
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_precision(engine: str, precision: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """In 16 bits the gradients are as near to float64 as the untiled run's on the same engine."""
    untiled = on_ranks(gradients, engine, "untiled", "", precision)
    tiled = on_ranks(gradients, engine, "disk", str(tmp_path), precision)
    for (plain, _), (found, true) in zip(untiled, tiled, strict=True):
        assert less_accurate(found, plain, true, torch.bfloat16) == {}
