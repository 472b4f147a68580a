"""The callbacks, with a strategy that the user chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy
from lt_tiled.callbacks import MemoryMonitor, Tiled, TilingReport
from tests.lit import LitTiny, logged, replaced, trainer
from tests.parity import near


def test_losses_are_the_same_and_it_is_undone() -> None:
    """Under a stock strategy the callback tiles fit, validate and predict, leaves losses as they are, and the model
    plain each time.
    """
    plain, model = LitTiny(), LitTiny()
    trainer("auto").fit(plain)
    callback = Tiled(4, None)
    run = trainer("auto", callbacks=[callback])
    run.fit(model)
    assert model.losses == near(plain.losses)
    assert model.val_losses == near(plain.val_losses)
    assert model.forwards_replaced == {6}
    assert replaced(model) == 0
    run.validate(model, verbose=False)
    run.predict(model)
    assert replaced(model) == 0


def test_it_is_undone_after_an_exception() -> None:
    """An exception in a step leaves the model plain."""
    model = LitTiny(steps_fail_at=1)
    with pytest.raises(ArithmeticError, match="the step failed"):
        trainer("auto", callbacks=[Tiled(4, None)]).fit(model)
    assert model.forwards_replaced == {6}
    assert replaced(model) == 0


def test_offloaded_checkpointing(tmp_path: Path) -> None:
    """Under a stock strategy the callback offloads, and leaves losses bit for bit and the model plain."""
    plain, model = LitTiny(), LitTiny()
    trainer("tiled", callbacks=[]).fit(plain)
    logger = CSVLogger(tmp_path, name="logs")
    callback = Tiled(True, ActivationCheckpointing(offload="disk", directory=str(tmp_path)))
    trainer("auto", callbacks=[callback, MemoryMonitor()], logger=logger, log_every_n_steps=1).fit(model)
    assert model.losses == plain.losses
    assert replaced(model) == 0
    sizes = [float(row["lt_tiled/offload_disk_bytes"]) for row in logged(logger.log_dir)]
    assert sizes == [2 * 24 * 16 * 4.0] * 3


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of a run the report prints what was tiled and recomputed, into how many tiles, the peak memory of a
    step, and what was offloaded per step.
    """
    strategy = TiledSingleDeviceStrategy(tiling=4, activation_checkpointing=ActivationCheckpointing(offload="disk"))
    report = TilingReport()
    trainer(strategy, callbacks=[report]).fit(LitTiny())
    assert report.report is not None
    assert [row.tokens for row in report.report.tiled] == [48, 48]
    assert report.peak > 2**26
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "2 x GatedMLP",
        "2 x Block",
        f"{report.peak / 2**30:.2f} GiB",
        "offloaded per step: 0.0 MiB to CPU memory, 0.0 MiB to disk",
    ):
        assert text in printed
