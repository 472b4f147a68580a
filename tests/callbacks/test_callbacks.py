"""The callbacks, with a strategy that the user chose."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from lt_tiled import ActivationCheckpointing
from lt_tiled.callbacks import MemoryMonitor, Tiled
from tests.lit import LitTiny, logged, replaced, trainer
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
