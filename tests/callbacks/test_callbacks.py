"""The callbacks, with a strategy that the user chose."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch.loggers import CSVLogger

import lt_tiled
from lt_tiled import ActivationCheckpointing
from lt_tiled.callbacks import MemoryMonitor, Tiled
from tests.lit import LitTiny, logged, replaced, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import near


def test_offload_and_figures_of_each_step(tmp_path: Path) -> None:
    """Under a stock strategy the callback offloads, and leaves losses bit for bit and the model plain. The monitor logs
    each step's peak, tiles, tokens per second and offloaded bytes.
    """
    plain, model = LitTiny(), LitTiny()
    trainer("tiled", callbacks=[]).fit(plain)
    monitor = MemoryMonitor()
    callback = Tiled(5, ActivationCheckpointing(offload="disk", directory=str(tmp_path)))
    logger = CSVLogger(tmp_path, name="logs")
    trainer("auto", callbacks=[callback, monitor], logger=logger, log_every_n_steps=1).fit(model)
    assert model.losses == near(plain.losses)
    assert replaced(model) == 0
    found = logged(logger.log_dir)
    assert len(found) == 3
    for row in found:
        assert float(row["lt_tiled/offload_disk_bytes"]) == 2 * 24 * 16 * 4
        assert float(row["lt_tiled/tiles"]) == 5
        assert float(row["lt_tiled/tokens_per_second"]) > 0
        assert 0 < float(row["lt_tiled/peak_memory"]) * 2**30 <= monitor.peak * 1.001  # logged in float32


def test_monitor_with_fabric(tmp_path: Path) -> None:
    """With Fabric the same figures are logged at each step of the optimizer, with the tokens that went into the model
    and the bytes that went to the disk.
    """
    policy = ActivationCheckpointing(offload="disk", directory=str(tmp_path), keep_last=0)
    fabric = Fabric(
        accelerator="cpu",
        strategy=lt_tiled.fabric.TiledSingleDeviceStrategy(tiling=3, activation_checkpointing=policy),
        callbacks=[MemoryMonitor()],
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
    found = logged(tmp_path)
    assert [float(row["lt_tiled/tiles"]) for row in found] == [3, 3]
    assert all(float(row["lt_tiled/tokens_per_second"]) > 0 for row in found)
    sizes = [float(row["lt_tiled/offload_disk_bytes"]) for row in found]
    assert sizes == [2 * 2 * 24 * 16 * 4] * 2  # blocks, sequences, tokens, hidden, bytes
