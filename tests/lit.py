"""A LightningModule around the tiny language model, with batches that depend on the step and the rank alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils.data import DataLoader

from tests.models import TinyLM, loss_of
from tests.parity import sgd
from tests.second_device import NAME


def sequences(count: int = 8, tokens: int = 24) -> list[Tensor]:
    """Sequences of which each is determined by its index."""
    generators = [torch.Generator().manual_seed(index) for index in range(count)]
    return [torch.randint(32, (tokens,), generator=generator) for generator in generators]


class Tiny:
    """What ``LitTiny`` does, without the LightningModule, of which there are two.

    Built in ``configure_model``; notes its losses, and at each step which modules are tiled.
    """

    trainer: Any

    def __init__(self, steps_fail_at: int | None = None, tiled_loss: bool = False) -> None:
        super().__init__()
        self.net: Any = None
        self.losses: list[float] = []
        self.val_losses: list[float] = []
        self.forwards_replaced: set[int] = set()
        self.steps_fail_at = steps_fail_at
        self.tiled_loss = tiled_loss

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = TinyLM()

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        if index == self.steps_fail_at:
            raise ArithmeticError("the step failed")
        self.forwards_replaced.add(replaced(self))
        loss = loss_of(self.net, ids, self.tiled_loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.val_losses.append(float(loss_of(self.net, ids, self.tiled_loss)))

    def predict_step(self, ids: Tensor, index: int) -> Tensor:
        return self.net(ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd([weight for weight in self.trainer.model.parameters() if weight.requires_grad])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(sequences(), batch_size=2)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(sequences(4), batch_size=2)

    predict_dataloader = val_dataloader


class LitTiny(Tiny, pl.LightningModule):
    """The tiny language model for the Trainer of ``lightning``."""


class SecondAccelerator(CPUAccelerator):
    """Lightning's part of a device that Lightning does not know, as a vendor would write it."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: the device has no context."""

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device(NAME, index) for index in range(devices)]

    @staticmethod
    def name() -> str:
        return NAME


def accelerator(device: str) -> Any:
    """What a Trainer takes for a value of the fixture ``device``."""
    return SecondAccelerator() if device == NAME else device


def replaced(model: torch.nn.Module) -> int:
    """How many modules below ``model`` have a forward of their own."""
    return sum("forward" in m.__dict__ for m in model.modules() if m is not model)


def trainer(strategy: Any, kind: type[Any] = pl.Trainer, **kwargs: Any) -> Any:
    """A quiet Trainer on the CPU for three steps."""
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    return kind(**({"accelerator": "cpu", "devices": 1, "max_steps": 3, "strategy": strategy} | quiet | kwargs))


def logged(folder: str | Path) -> list[dict[str, str]]:
    """Return the rows of the CSV of a run, or none if nothing was logged."""
    return [row for path in Path(folder).rglob("metrics.csv") for row in csv.DictReader(path.read_text().splitlines())]
