"""The monitor: figures of each step, and the picture of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch.loggers import CSVLogger

import lt_tiled
from lt_tiled import ActivationCheckpointing, TiledDDPStrategy, TiledSingleDeviceStrategy
from lt_tiled.callbacks import MemoryMonitor
from lt_tiled.lm import CausalLM, TextFiles
from tests.lit import LitTiny, accelerator, logged, trainer
from tests.models import TinyLM, lm_loss
from tests.planner.runs import LLAMA, TWO


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's CSV that hold the monitor's figures."""
    return [row for row in logged(folder) if row["lt_tiled/peak_memory"]]


@pytest.mark.table("TiledDDPStrategy")
@pytest.mark.parametrize("strategy", [TiledSingleDeviceStrategy, TiledDDPStrategy])
def test_picture_and_prediction(strategy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture is drawn, its measured peak is within 2 % of the predicted one, and a line tells both."""
    monitor = MemoryMonitor(plot=str(tmp_path / "step.png"))
    run = trainer(strategy(tiling=4), callbacks=[monitor], max_steps=4, limit_val_batches=0)
    run.fit(CausalLM(LLAMA), datamodule=TextFiles(seq_len=1024))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert monitor.measured is not None
    assert monitor.predicted is not None
    assert monitor.predicted.peak == pytest.approx(monitor.measured.peak, rel=0.02)
    assert list(monitor.measured.phases) == ["forward", "backward", "optimizer"]
    assert monitor.measured.parts_at(monitor.measured.peak_at).keys() >= {
        "weights",
        "optimizer",
        "block inputs",
        "attention",
    }
    assert "memory of step 2: " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("device", ["second"], indirect=True)
def test_record_of_an_accelerator(device: str, tmp_path: Path) -> None:
    """Of an accelerator without CUDA's trace, a step is recorded tensor by tensor, those of autograd's thread too: its
    peak is that of the allocator.
    """
    monitor = MemoryMonitor(plot=str(tmp_path / "step.png"))
    on = {"accelerator": accelerator(device), "callbacks": [monitor], "limit_val_batches": 0}
    run = trainer(TiledSingleDeviceStrategy(tiling=3), max_steps=3, **on)
    run.fit(CausalLM(TWO), datamodule=TextFiles(seq_len=240))
    assert monitor.measured is not None
    assert monitor.measured.peak == pytest.approx(monitor.peak, rel=0.01)
    assert list(monitor.measured.phases) == ["forward", "backward", "optimizer"]


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
    policy = ActivationCheckpointing(offload="disk", directory=str(tmp_path), min_bytes=0, keep_last=0)
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


def test_a_run_that_is_too_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends before the step of the picture says so; an ending that cannot be drawn is refused at once."""
    with caplog.at_level("WARNING", "lt_tiled"):
        trainer("tiled", callbacks=[MemoryMonitor(plot=str(tmp_path / "a.svg"), step=9)], limit_val_batches=0).fit(
            LitTiny()
        )
    assert "the run ended after 3 steps" in caplog.text
    assert not (tmp_path / "a.svg").exists()
    with pytest.raises(ValueError, match=r"'a.jpeg2' must end in .png, .svg or .pdf"):
        MemoryMonitor(plot="a.jpeg2")


def test_an_exception_in_the_step_of_the_picture(tmp_path: Path) -> None:
    """After an exception while a step is recorded nothing is left of the recording, and the next run works."""
    monitor = MemoryMonitor(plot=str(tmp_path / "a.png"), step=1)
    with pytest.raises(ArithmeticError, match="the step failed"):
        trainer("tiled", callbacks=[monitor], limit_val_batches=0).fit(LitTiny(steps_fail_at=1))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    trainer("tiled", callbacks=[monitor], limit_val_batches=0).fit(LitTiny())
    assert (tmp_path / "a.png").exists()


class NeedsARun(LitTiny):
    """Asks its optimizer in the step, which a simulation has none of."""

    def training_step(self, ids: Any, index: int) -> Any:
        assert self.optimizers().param_groups
        return super().training_step(ids, index)


def test_a_module_that_cannot_be_predicted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose module cannot be simulated ends as it would, with a picture of what was measured and the reason."""
    monitor = MemoryMonitor(plot=str(tmp_path / "a.png"))
    with caplog.at_level("WARNING", "lt_tiled"):
        trainer("tiled", callbacks=[monitor], limit_val_batches=0).fit(NeedsARun())
    assert (monitor.measured is None, monitor.predicted) == (False, None)
    assert "MemoryMonitor has no prediction" in caplog.text
    assert (tmp_path / "a.png").exists()


@pytest.mark.full
def test_accumulation(tmp_path: Path) -> None:
    """With several batches for each step of the optimizer, the picture is of a batch on which it steps, and the
    prediction holds.
    """
    monitor = MemoryMonitor(plot=str(tmp_path / "a.png"))
    run = trainer(
        TiledSingleDeviceStrategy(tiling=4),
        callbacks=[monitor],
        max_steps=3,
        accumulate_grad_batches=2,
        limit_val_batches=0,
    )
    run.fit(CausalLM(LLAMA), datamodule=TextFiles(seq_len=1024))
    assert monitor.measured is not None
    assert monitor.predicted is not None
    assert "optimizer" in monitor.measured.phases
    assert monitor.predicted.peak == pytest.approx(monitor.measured.peak, rel=0.02)
