"""The monitor: figures of each step."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch.loggers import CSVLogger

import lt_tiled
from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy
from lt_tiled.callbacks import MemoryMonitor
from tests.lit import LitTiny, logged, trainer
from tests.models import TinyLM, lm_loss


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's CSV that hold the monitor's figures."""
    return [row for row in logged(folder) if row["lt_tiled/peak_memory"]]


def test_figures_of_each_step(tmp_path: Path) -> None:
    """Each step's peak, tiles and tokens per second are in the run's logger."""
    monitor = MemoryMonitor()
    run = trainer(
        TiledSingleDeviceStrategy(tiling=5),
        callbacks=[monitor],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        limit_val_batches=0,
    )
    run.fit(LitTiny())
    found = rows(tmp_path)
    assert len(found) == 3
    for row in found:
        assert float(row["lt_tiled/tiles"]) == 5
        assert float(row["lt_tiled/tokens_per_second"]) > 0
        assert 0 < float(row["lt_tiled/peak_memory"]) * 2**30 <= monitor.peak


def test_fabric(tmp_path: Path) -> None:
    """With Fabric the same figures are logged at each step of the optimizer, with the tokens that went into the model
    and the bytes that went to the disk.
    """
    policy = ActivationCheckpointing(offload="disk", directory=str(tmp_path), keep_last=0)
    monitor = MemoryMonitor()
    fabric = Fabric(
        accelerator="cpu",
        strategy=lt_tiled.fabric.TiledSingleDeviceStrategy(tiling=3, activation_checkpointing=policy),
        callbacks=[monitor],
        loggers=FabricCSVLogger(tmp_path, flush_logs_every_n_steps=1),
    )
    fabric.launch()
    net = TinyLM()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        ids = torch.zeros(2, 24, dtype=torch.long)
        fabric.backward(lm_loss(model(ids), ids))
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.release()
    found = rows(tmp_path)
    assert [float(row["lt_tiled/tiles"]) for row in found] == [3, 3]
    assert all(float(row["lt_tiled/tokens_per_second"]) > 0 for row in found)
    sizes = [float(row["lt_tiled/offload_disk_bytes"]) for row in found]
    assert sizes == [2 * 2 * 24 * 16 * 4] * 2  # blocks, sequences, tokens, hidden, bytes
