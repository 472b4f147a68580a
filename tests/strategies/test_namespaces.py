"""The strategies and callbacks for ``pytorch_lightning`` in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lt_tiled
from tests.lit import Tiny, replaced, sequences, trainer

pytorch_lightning = pytest.importorskip("pytorch_lightning")

from pytorch_lightning.cli import LightningCLI  # noqa: E402
from pytorch_lightning.loggers import CSVLogger  # noqa: E402

import lt_tiled.pytorch_lightning  # noqa: E402
from lt_tiled.strategies.base import TiledStrategy  # noqa: E402

STRATEGIES = lt_tiled.fabric.__all__


class LitTiny(Tiny, pytorch_lightning.LightningModule):
    """The tiny language model for the Trainer of ``pytorch_lightning``."""


class IdsModule(pytorch_lightning.LightningDataModule):
    """Sequences of a length that can be set, shifted by a hook of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.seq_len = 8

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(sequences(tokens=self.seq_len), batch_size=2)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch + 1) % 32


def test_the_same_strategies() -> None:
    """Each strategy has the arguments of that for ``lightning``, is pickled, and is of its own package."""
    registry, known = pytorch_lightning.strategies.StrategyRegistry, lt_tiled.trainer.strategies.StrategyRegistry
    for name in STRATEGIES:
        kind = getattr(lt_tiled.pytorch_lightning, name)
        assert not issubclass(kind, getattr(lt_tiled, name))
        strategy = pickle.loads(pickle.dumps(kind(tiling=4)))
        assert type(strategy) is kind
        assert isinstance(strategy, TiledStrategy)
        assert strategy.tiling == lt_tiled.Tiling(4)
    names = [name for name in registry.available_strategies() if name.startswith("tiled")]
    assert names == [name for name in known.available_strategies() if name.startswith("tiled")]
    for name in names:
        assert registry[name]["strategy"].__module__ == "lt_tiled.pytorch_lightning"
        assert registry[name]["strategy"].__name__ == known[name]["strategy"].__name__
        assert registry[name]["init_params"] == known[name]["init_params"]


def test_callbacks(tmp_path: Path) -> None:
    """All callbacks work together with the Trainer, the module and the datamodule of ``pytorch_lightning``."""
    home, data, model = lt_tiled.pytorch_lightning, IdsModule(), LitTiny()
    finder = home.SequenceLengthFinder(start=8, limit=24, granule=8)
    monitor, report = home.MemoryMonitor(), home.TilingReport()
    offload = lt_tiled.ActivationCheckpointing(offload="disk", keep_last=0)
    callbacks = [home.Tiled(4, offload), finder, monitor, report]
    assert all(isinstance(callback, pytorch_lightning.Callback) for callback in callbacks)
    logger = CSVLogger(str(tmp_path))
    run = trainer("auto", pytorch_lightning.Trainer, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    model.configure_model()
    run.fit(model, datamodule=data)
    assert finder.found == data.seq_len == 24
    assert model.forwards_replaced == {6}
    assert replaced(model) == 0
    assert [row.tiles for row in report.report.tiled] == [4, 4]
    assert monitor.peak > 0
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"lt_tiled/peak_memory", "lt_tiled/offload_disk_bytes"} <= set(header)


def test_command_line() -> None:
    """A ``LightningCLI`` of ``pytorch_lightning`` takes strategies by class and by name, and callbacks."""
    command = [
        "--trainer.strategy=lt_tiled.pytorch_lightning.TiledDDPStrategy",
        "--trainer.strategy.tiling.num_shards=2",
        "--trainer.strategy.find_unused_parameters=true",
        "--trainer.callbacks+=lt_tiled.pytorch_lightning.TilingReport",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
    ]
    made = LightningCLI(LitTiny, run=False, args=command, save_config_callback=None)
    assert type(made.trainer.strategy) is lt_tiled.pytorch_lightning.TiledDDPStrategy
    assert made.trainer.strategy.tiling == lt_tiled.Tiling(2)
    assert any(type(c) is lt_tiled.pytorch_lightning.TilingReport for c in made.trainer.callbacks)
    named = LightningCLI(LitTiny, run=False, args=["--trainer.strategy=tiled_ddp", *command[-2:]])
    assert type(named.trainer.strategy) is lt_tiled.pytorch_lightning.TiledDDPStrategy


def test_verify() -> None:
    """``lt_tiled.verify`` compares the ``training_step`` of a module of ``pytorch_lightning``."""
    model = LitTiny()
    model.configure_model()
    batch = torch.stack(sequences(2))
    result = lt_tiled.verify(model, batch, strategy=lt_tiled.TiledSingleDeviceStrategy(tiling=4))
    assert result.passed
    assert set(result.tiles.values()) == {4}
