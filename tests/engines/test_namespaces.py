"""``pytorch_lightning`` in the place of ``lightning``: a slice of the matrix of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engines.cells import ENGINES, Look, Ran, in_trainer, policies, strategy
from tests.engines.conftest import OnRanks
from tests.lit import Tiny, replaced, trainer
from tests.parity import near

pytorch_lightning = pytest.importorskip("pytorch_lightning")

import lt_tiled.pytorch_lightning  # noqa: E402


class LitTiny(Tiny, pytorch_lightning.LightningModule):
    """The tiny language model for the Trainer of ``pytorch_lightning``."""


class LookElsewhere(Look, pytorch_lightning.Callback):
    """Reads the report in a Trainer of ``pytorch_lightning``."""


def in_other_trainer(engine: str, mode: str, directory: str) -> Ran:
    return in_trainer(
        engine,
        mode,
        directory,
        home=lt_tiled.pytorch_lightning,
        module=LitTiny,
        observer=LookElsewhere,
        kind=pytorch_lightning.Trainer,
    )


@pytest.mark.table("ddp|fsdp2|zero2")
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_are_the_untiled_ones(engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """With everything on, losses and tiles are those of ``lightning``, and the model is restored."""
    untiled = on_ranks.once(in_trainer, engine, "untiled", "")
    for plain, tiled in zip(untiled, on_ranks(in_other_trainer, engine, "loss", str(tmp_path)), strict=True):
        assert tiled.losses == near(plain.losses)
        assert tiled.val_losses == near(plain.val_losses)
        assert tiled.tiles == [4, 4]
        assert (tiled.blocks, tiled.left) == (2, 0)
        assert tiled.disk_bytes > 0
    assert list(tmp_path.iterdir()) == []


def by_callback(engine: str) -> tuple[list[float], str]:
    model = LitTiny()
    model.configure_model()
    chosen = strategy(lt_tiled.pytorch_lightning, engine, **policies("untiled", ""))
    callback = lt_tiled.pytorch_lightning.TiledMLP(4)
    run = trainer(chosen, pytorch_lightning.Trainer, devices=dist.get_world_size(), callbacks=[callback])
    try:
        run.fit(model)
    except ValueError as error:
        return model.losses, str(error)
    finally:
        assert replaced(model) == 0
    return model.losses, ""


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_the_callback_knows_the_engine(engine: str, on_ranks: OnRanks) -> None:
    """``TiledMLP`` adapts tiles to DeepSpeed's stage, and refuses ZeRO-3, as under ``lightning``."""
    untiled: list[Any] = on_ranks.once(in_trainer, "ddp", "untiled", "")
    for plain, (losses, error) in zip(untiled, on_ranks(by_callback, engine), strict=True):
        if engine == "zero3":
            assert "is tiled and not inside a leaf module of ZeRO-3" in error
        else:
            assert losses == near(plain.losses)
