"""The harness of ``python -m benchmarks.projects`` tells right from wrong, on a project that is written here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn

from benchmarks.projects.compare import STEPS, Project, Trained, row, train
from benchmarks.sheet import Cell
from tests.models import TinyLM, lm_loss


class Module(lightning.pytorch.LightningModule):
    """A small language model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM()

    def training_step(self, ids: Tensor) -> Tensor:
        return lm_loss(self.model(ids), ids)


def build() -> tuple[Any, list[Any]]:
    """Return the model with two batches."""
    torch.manual_seed(0)
    return Module(), [torch.randint(8, (1, 2048)) for _ in range(STEPS)]


def verdicts(cells: list[Cell | str]) -> list[bool | None]:
    """Return the verdicts of losses and weights."""
    return [cell.good if isinstance(cell, Cell) else None for cell in cells[2:4]]


def test_right_and_wrong() -> None:
    """Losses and weights of all strategies are those of the untiled run, and the row names what is tiled; a wrong loss
    or a wrong weight in one strategy is wrong.
    """
    runs = dict[str, Trained]()

    def trained(module: Any, batches: list[Any], strategy: str = "auto", **policies: Any) -> Trained:
        key = f"{strategy}{policies}"
        runs[key] = runs.get(key) or train(module, batches, strategy, **policies)
        return runs[key]

    right = row(Project("here", "TinyLM", build), trained)
    assert verdicts(right) == [True, True]
    assert "GatedMLP" in str(right[4])
    ddp = runs["TiledDDPStrategy{}"]
    runs["TiledDDPStrategy{}"] = replace(ddp, losses=[loss * 1.001 for loss in ddp.losses])
    assert verdicts(row(Project("here", "TinyLM", build), trained)) == [False, True]
    runs["TiledDDPStrategy{}"] = replace(ddp, weights=[weight * 1.001 for weight in ddp.weights])
    assert verdicts(row(Project("here", "TinyLM", build), trained)) == [True, False]


def test_what_does_not_train_is_a_row() -> None:
    """A model that cannot be built is a red row with the reason, and does not end the others."""

    def fails() -> tuple[nn.Module, list[Any]]:
        raise ModuleNotFoundError("No module named 'boltz'")

    cells = row(Project("boltz", "Boltz2", fails))
    assert isinstance(cells[2], Cell)
    assert cells[2] == Cell("ModuleNotFoundError: No module named 'boltz'", False)


@pytest.fixture(autouse=True)
def _in_one_process() -> Iterator[None]:
    """Leave no process group behind."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
