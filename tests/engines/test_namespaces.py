"""``pytorch_lightning`` in the place of ``lightning``: a row of the matrix of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.cells import Look, Ran, in_trainer
from tests.engines.conftest import OnRanks
from tests.lit import Tiny
from tests.parity import near

pytorch_lightning = pytest.importorskip("pytorch_lightning")

import lt_tiled.pytorch_lightning  # noqa: E402


class LitTiny(Tiny, pytorch_lightning.LightningModule):
    """The tiny language model for the Trainer of ``pytorch_lightning``."""


class LookElsewhere(Look, pytorch_lightning.Callback):
    """Reads the report in a Trainer of ``pytorch_lightning``."""


def in_other_trainer(engine: str, mode: str, directory: str) -> Ran:
    elsewhere: dict[str, Any] = {"home": lt_tiled.pytorch_lightning, "module": LitTiny, "observer": LookElsewhere}
    return in_trainer(engine, mode, directory, kind=pytorch_lightning.Trainer, **elsewhere)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_losses_are_the_untiled_ones(engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """With everything on, losses and tiles are those of ``lightning``, and the model is restored."""
    untiled = on_ranks.once(in_trainer, engine, "untiled", "")
    for plain, tiled in zip(untiled, on_ranks(in_other_trainer, engine, "loss", str(tmp_path)), strict=True):
        assert tiled.losses == near(plain.losses)
        assert tiled.val_losses == near(plain.val_losses)
        assert tiled.tiles == [4, 4]
        assert (tiled.blocks, tiled.left) == (2, 0)
        assert tiled.disk_bytes > 0
