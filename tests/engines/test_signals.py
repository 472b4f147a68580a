"""SIGTERM, as a preempted job gets it, ends all ranks before the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

import lt_tiled
from tests.engines.cells import policies, strategy
from tests.engines.conftest import OnRanks
from tests.engines.test_checkpoints import ByIndex, run
from tests.lit import trainer


class Terminated(ByIndex):
    """Some of its ranks get SIGTERM in the first batch of their second step."""

    def __init__(self, ranks: Collection[int], batches: int) -> None:
        super().__init__()
        self.ranks, self.batches = ranks, batches

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = super().training_step(ids, index)
        if index == self.batches and self.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss


def end_and_resume(case: str, ranks: Collection[int], batches: int, directory: str, spill: str) -> dict[str, Any]:
    """Four steps at once, and four that SIGTERM interrupts, with a checkpoint at the interruption."""
    options: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": batches}
    heard: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    whole, first, second = ByIndex(), Terminated(ranks, batches), ByIndex()
    try:
        run(case, spill, **options).fit(whole)
        save = ModelCheckpoint(directory, "{step}", every_n_train_steps=100, save_on_exception=True)
        with pytest.raises(SIGTERMException) as ended:
            run(case, spill, **options, callbacks=[save], enable_checkpointing=True).fit(first)
        (last,) = Path(directory).glob("*.ckpt")
        run(case, spill, **options).fit(second, ckpt_path=str(last), weights_only=False)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return {"code": ended.value.code, "whole": whole.losses, "parts": (first.losses, second.losses), "heard": heard}


@pytest.mark.table("zero3.*")
@pytest.mark.parametrize(
    ("case", "ranks", "batches"),
    [
        ("ddp", (0,), 1),
        ("ddp", (1,), 2),
        ("ddp", (0, 1), 1),
        ("fsdp full", (1,), 1),
        ("fsdp2 sharded", (1,), 1),
        ("zero3", (1,), 1),
    ],
)
def test_sigterm(case: str, ranks: Collection[int], batches: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    """SIGTERM to any rank ends all of them after the optimizer's step, with the exit code of SIGTERM from rank 0 alone;
    callbacks save a checkpoint, from which a run goes on with the losses of an undisturbed one; and other handlers are
    called.
    """
    (spill := tmp_path / "spill").mkdir()
    for rank, told in enumerate(on_ranks(end_and_resume, case, ranks, batches, str(tmp_path / "saved"), str(spill))):
        assert told["code"] == (0 if rank else 143)
        first, second = told["parts"]
        assert (len(first), first + second) == (2 * batches, told["whole"])
        assert len(told["heard"]) == (rank in ranks)
    assert list(spill.iterdir()) == []


class TerminatedEarly(ByIndex):
    """Rank 1 gets SIGTERM in the sanity check."""

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self.train_dataloader()

    def validation_step(self, ids: Tensor, index: int) -> None:
        if self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()


def end_in_the_sanity_check(spill: str) -> int:
    model, chosen = TerminatedEarly(), strategy(lt_tiled, "ddp", **policies("disk", spill))
    checked = trainer(chosen, devices=2, max_steps=2, num_sanity_val_steps=2, limit_val_batches=2)
    with pytest.raises(SIGTERMException):
        checked.fit(model)
    return len(model.losses)


def test_sigterm_in_the_sanity_check(on_ranks: OnRanks, tmp_path: Path) -> None:
    """SIGTERM to a rank in the sanity check ends all ranks before the first step."""
    assert on_ranks(end_in_the_sanity_check, str(tmp_path)) == [0, 0]
