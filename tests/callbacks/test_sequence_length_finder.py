"""The longest sequence that trains, by trying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lt_tiled import TiledSingleDeviceStrategy
from lt_tiled.callbacks import SequenceLengthFinder, Tiled
from lt_tiled.lm import CausalLM, TextFiles
from tests.lit import LitTiny, accelerator, trainer
from tests.planner.runs import LLAMA
from tests.world import World


class Long(LitTiny):
    """Its sequences have an attribute for their length; past a limit a step runs out of memory."""

    def __init__(self, fits: int = 10**9) -> None:
        super().__init__()
        self.seq_len = 24
        self.fits = fits
        self.lengths: list[int] = []

    def training_step(self, ids: Any, index: int) -> Any:
        self.lengths.append(ids.shape[1])
        if ids.shape[1] > self.fits:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"
            )
        return super().training_step(ids, index)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(8)[:, None].expand(8, self.seq_len) % 32, batch_size=2)


@pytest.mark.parametrize(
    ("fits", "arguments", "found"),
    [
        (128, {"start": 64, "granule": 16}, 128),
        (300, {"start": 64, "granule": 16}, 288),
        (40, {"start": 128, "granule": 8}, 40),
        (10**9, {"start": 32, "granule": 8, "limit": 100}, 100),
        (10**9, {"start": 64, "limit": 32}, 32),
    ],
)
def test_doubling_and_bisection(fits: int, arguments: dict[str, int], found: int) -> None:
    """The length is the longest multiple of the granule, or the limit, that fits, and the run trains on it."""
    module = Long(fits)
    finder = SequenceLengthFinder(**arguments)
    trainer("tiled", callbacks=[finder], limit_val_batches=0).fit(module)
    assert finder.found == module.seq_len == found
    assert module.lengths[-3:] == [found] * 3
    assert len(module.lengths) - 3 <= 12


def test_other_errors_are_not_hidden() -> None:
    """An error that is not about memory ends the search, and the module logs as before."""
    module = Long()
    module.steps_fail_at = 0
    with pytest.raises(ArithmeticError, match="the step failed"):
        trainer("tiled", callbacks=[SequenceLengthFinder(start=64)], limit_val_batches=0).fit(module)
    assert "log" not in vars(module)


def test_data_of_a_datamodule() -> None:
    """The length of a datamodule is set, and its data cut anew."""
    data = TextFiles(seq_len=256)
    finder = SequenceLengthFinder(start=128, limit=512)
    run = trainer(TiledSingleDeviceStrategy(tiling=2), callbacks=[finder], max_steps=1, limit_val_batches=0)
    run.fit(CausalLM(LLAMA), datamodule=data)
    assert data.seq_len == 512
    assert next(iter(run.train_dataloader))["input_ids"].shape == (1, 512)


def ranks_agree() -> tuple[int, list[int]]:
    rank = torch.distributed.get_rank()
    module = Long((200, 90)[rank])
    trainer("tiled_ddp", devices=2, callbacks=[SequenceLengthFinder(start=64, granule=16)], limit_val_batches=0).fit(
        module
    )
    return module.seq_len, module.lengths[-3:]


@pytest.mark.self_checks
def test_ranks_agree(world: World) -> None:
    """What does not fit on one rank is taken for none."""
    assert world(ranks_agree) == [(80, [80] * 3)] * 2


class Careful(Long):
    """Holds what a search might change: dropout, frozen parts, counts, a schedule over the run's steps."""

    def __init__(self, fits: int = 10**9) -> None:
        super().__init__(fits)
        self.configure_model()
        self.net.blocks.append(torch.nn.Dropout(0.1))
        self.net.blocks[0].eval()
        self.metric = MeanMetric()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, ids: Any) -> Any:
        self.metric.update(1.0)
        self.count = self.count + 1
        return super().training_step(ids, 0)

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.mark.self_checks
def test_it_leaves_nothing_behind(device: str) -> None:
    """Losses of the run are those of a run that begins at that length: weights, random numbers, frozen parts and the
    optimizer are as before. Metrics and buffers count the run alone.
    """
    plain, tried = Careful(), Careful(200)
    plain.seq_len = 192
    options = {"limit_val_batches": 0, "accelerator": accelerator(device)}
    torch.manual_seed(0)
    trainer("tiled", **options).fit(plain)
    torch.manual_seed(0)
    trainer("tiled", callbacks=[SequenceLengthFinder(start=64, granule=64)], **options).fit(tried)
    assert tried.seq_len == 192
    assert tried.losses[-3:] == plain.losses
    assert not tried.net.blocks[0].training
    assert int(tried.count) == tried.metric._update_count == 3


def test_refused() -> None:
    """Bounds that cannot be, data whose length has another name, loaders given to ``fit`` and a memory in which nothing
    fits are refused.
    """
    for name in ("start", "granule"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            SequenceLengthFinder(**{name: 0})
    loader = DataLoader(torch.zeros(8, 24, dtype=torch.long), batch_size=2)
    for module, given in ((LitTiny(), None), (Long(), loader)):
        with pytest.raises(ValueError, match=r"attribute 'seq_len'.*not loaders, or name yours with"):
            trainer("auto", callbacks=[SequenceLengthFinder()], limit_val_batches=0).fit(module, given)
    with pytest.raises(RuntimeError, match="Not even 8 tokens fit"):
        trainer("tiled", callbacks=[SequenceLengthFinder(start=64, granule=8)], limit_val_batches=0).fit(Long(4))


def test_a_callback_that_tiles() -> None:
    """The finder tries the model with what a callback did to it, wherever that stands."""
    module = Long()
    trainer("auto", callbacks=[SequenceLengthFinder(start=64, limit=64), Tiled(2, None)], limit_val_batches=0).fit(
        module
    )
    assert module.forwards_replaced == {6}
