"""``lt-tiled plan`` from its configuration to what it prints and draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lt_tiled.cli import main
from tests.test_cli import QUICKSTART

pytestmark = pytest.mark.slow

SMALL = "--model.init_args.config.num_hidden_layers=1"
"""For searches, which plan many times."""


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command prints."""
    main(["plan", "--config", QUICKSTART, "--trainer.accelerator=cpu", *args])
    return " ".join(capsys.readouterr().out.split())


def test_prints_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the parts of the peak, the settings, the FLOPs, and whether it fits."""
    disk = "--trainer.strategy.init_args.activation_checkpointing=disk"
    text = planned(capsys, "--seq=8192", "--memory=1GiB", "--gpu=a100", disk)
    for expected in (
        "CausalLM, 8192 tokens",
        " weights ",
        " attention ",
        "predicted peak of a rank",
        "ddp, Tiling(), ActivationCheckpointing(offload='disk'",
        "TFLOP per step",
        "Speed on a100: ",
        "s per step, bound by ",
        "to CPU memory and 12.0 MiB to disk per step.",
        "It fits into 1.00 GiB, with ",
    ):
        assert expected in text
    assert "more than 4.0 MiB" in planned(capsys, SMALL, "--memory=4MiB")


def test_sharded_over_other_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """``--devices`` says how many ranks there would be, of any engine, without one of them."""
    strategy = ("--trainer.strategy=lt_tiled.TiledDeepSpeedStrategy", "--trainer.strategy.stage=3")
    assert "zero3 over 64 ranks" in planned(capsys, *strategy, "--devices=64")


@pytest.mark.full
def test_settings_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """``--find settings`` prints what to set, for the engine of the configuration."""
    strategy = ("--trainer.strategy=ddp_find_unused_parameters_true", "--devices=2")
    text = planned(capsys, SMALL, *strategy, "--seq=16384", "--memory=90MiB", "--find=settings")
    assert "16384 tokens" in text
    assert "Settings: ddp over 2 ranks, Tiling(), ActivationCheckpointing(keep='attention'), tiled loss." in text


@pytest.mark.full
def test_longest_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    """``--find max-seq`` prints the longest length, keeps the settings that it was given, a number of tiles among them,
    and the picture is drawn.
    """
    strategy = ("--trainer.strategy=lt_tiled.TiledSingleDeviceStrategy", "--trainer.strategy.tiling=8")
    text = planned(capsys, SMALL, "--memory=20MiB", "--find=max-seq", "--plot=step.svg", *strategy)
    assert "It fits into 20.0 MiB" in text
    assert "single, Tiling(num_shards=8)" in text
    assert Path("step.svg").stat().st_size > 10_000


REFUSED = {
    "--find=max-seq": "find='max-seq' needs the memory of a device: pass --memory",
    "--memory=lots": "memory='lots' is not a number of bytes",
    "--seq=0": "seq=0 must be None or an integer of at least 1",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_planned(arguments: str) -> None:
    """Arguments that lack something, exclude each other or name nothing known are refused."""
    with pytest.raises(ValueError, match=re.escape(REFUSED[arguments])):
        main(["plan", "--config", QUICKSTART, *arguments.split()])


def test_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A model and data of the user's own are planned by their import path."""
    main(["plan", "--model=tests.lit.LitTiny", "--trainer.strategy=tiled", "--trainer.accelerator=cpu", "--seq=512"])
    text = " ".join(capsys.readouterr().out.split())
    assert "LitTiny, 512 tokens" in text
    assert "single, Tiling(), ActivationCheckpointing()" in text
