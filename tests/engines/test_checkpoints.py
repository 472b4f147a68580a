"""Checkpoints of every engine: resumed in the middle of an epoch, and loaded into the plain model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_tiled
from tests.engines.cells import draw, error_of, launch, policies, set_up, strategy, train
from tests.lit import LitTiny, sequences, trainer
from tests.models import TinyLM, lm_loss
from tests.parity import near
from tests.world import OnRanks, World

FORMATS = {
    "ddp": {},
    "fsdp sharded": {"state_dict_type": "full"},  # on the CPU, FSDP saves sharded checkpoints
    "fsdp_flat sharded": {"state_dict_type": "sharded"},
    "fsdp2 full": {"save_distributed_checkpoint": False},
    "fsdp2 sharded": {"save_distributed_checkpoint": True},
    "zero1": {},
    "zero2": {},
    "zero3": {},
}
"""An engine and the form in which it saves, with the arguments that ask for it."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


class Steps(LitTiny):
    """Its batches depend on their index and the rank alone, so that a resumed run sees those of an uninterrupted one,
    and its optimizer has two states of each weight. Some weights are frozen, or its parameter groups are in another
    order than its weights.
    """

    def __init__(self, frozen: bool = False, reordered: bool = False) -> None:
        super().__init__()
        self.frozen, self.reordered = frozen, reordered

    def configure_model(self) -> None:
        super().configure_model()
        self.net.blocks[0].requires_grad_(not self.frozen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        return adamw([{"params": weights[3:]}, {"params": weights[:3]}] if self.reordered else weights)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(sequences(16), batch_size=2)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return super().training_step(draw((2, 20 + index), self.global_rank), index)


def run(case: str, directory: str, mode: str = "disk", **kwargs: Any) -> pl.Trainer:
    chosen = strategy(lt_tiled, case.split()[0], **policies(mode, directory), **FORMATS[case])
    return trainer(chosen, devices=dist.get_world_size(), limit_val_batches=0, **kwargs)


def interrupt(case: str, path: str, directory: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of four steps at once, untiled, and of two and two with a checkpoint between, each by a new trainer. The
    last one saves what it trained, and validates it.
    """
    whole, first, second = Steps(), Steps(), Steps()
    run(case, directory, "untiled", max_steps=4).fit(whole)
    before = run(case, directory, max_steps=2)
    before.fit(first)
    before.save_checkpoint(f"{path}.half")
    after = run(case, directory, max_steps=4)
    after.fit(second, ckpt_path=f"{path}.half", weights_only=False)
    after.save_checkpoint(path)
    after.limit_val_batches = 1
    after.validate(second, verbose=False)
    return whole.losses, first.losses + second.losses, second.val_losses


def plain_state(case: str, path: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint, by Lightning's own tools."""
    if case.startswith("zero"):
        return convert_zero_checkpoint_to_fp32_state_dict(path, path.with_suffix(".pt"))["state_dict"]
    if path.is_dir():
        checkpoint = _load_distributed_checkpoint(path)
        return checkpoint["state_dict" if case.startswith("fsdp2") else "model"]
    return torch.load(path, weights_only=False)["state_dict"]


def validate_plain(state: dict[str, Tensor], rank: int) -> list[float]:
    """The loss of the plain model, which has these weights and no others, on the batch that a rank validated."""
    model = TinyLM()
    model.load_state_dict({name.removeprefix("net."): weight for name, weight in state.items()}, strict=True)
    ids = torch.stack([sequences()[rank], sequences()[rank + 2]])
    return [float(lm_loss(model(ids), ids).detach())]


@pytest.mark.table("ddp|fsdp2 .*|fsdp sharded|zero3")
@pytest.mark.parametrize("case", FORMATS)
def test_resume_and_load(case: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """A run that is interrupted after two of four batches has the losses of one that is not, optimizer state included.

    Its checkpoint, a sharded one after Lightning's or DeepSpeed's tool made it whole, has the plain model's keys and
    loads into it strictly, with the losses that the engine validated.
    """
    (spill := tmp_path / "spill").mkdir()
    path = tmp_path / "trained.ckpt"
    for rank, (whole, parts, val_losses) in enumerate(on_ranks(interrupt, case, str(path), str(spill))):
        assert len(whole) == 4
        assert parts == near(whole, optimizer=adamw)
        assert val_losses == near(validate_plain(plain_state(case, path), rank), optimizer=adamw)


def fabric_steps(case: str, directory: str, steps: range, load: str = "", save: str = "") -> list[float]:
    """Steps on batches that depend on their number, from a checkpoint and to one."""
    engine = case.split()[0]
    fabric = launch(engine, **policies("disk" if load or save else "untiled", directory), **FORMATS[case])
    model, optimizer = set_up(fabric, TinyLM(), engine, adamw)
    state = {"model": model, "optimizer": optimizer, "done": 0}
    if load:
        fabric.load(load, state, weights_only=False)
        assert state["done"] == steps.start
    losses = train(fabric, model, optimizer, (draw((2, 20 + step), fabric.global_rank) for step in steps))
    if save:
        fabric.save(save, state | {"done": steps.stop})
    fabric.strategy.release()
    return losses


def fabric_interrupt(case: str, path: str, directory: str) -> tuple[list[float], list[float]]:
    first = fabric_steps(case, directory, range(2), save=path)
    return fabric_steps(case, directory, range(4)), first + fabric_steps(case, directory, range(2, 4), load=path)


@pytest.mark.table("fsdp2 sharded|fsdp_flat sharded")
@pytest.mark.parametrize("case", FORMATS)
def test_fabric_resumes(case: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """``fabric.save`` and ``fabric.load`` in each format carry weights, optimizer state and the user's own values."""
    (spill := tmp_path / "spill").mkdir()
    for whole, parts in on_ranks(fabric_interrupt, case, str(tmp_path / "run.ckpt"), str(spill)):
        assert parts == near(whole, optimizer=adamw)


def resume_elsewhere(loading: str, path: str, changes: dict[str, bool]) -> tuple[str, str]:
    """Train two steps under DDP and two in a format of another engine, and return the error of the latter."""
    whole, first, second = (Steps(**changes) for _ in range(3))
    run("ddp", "", "untiled", max_steps=4).fit(whole)
    before = run("ddp", "", "untiled", max_steps=2)
    before.fit(first)
    before.save_checkpoint(path)
    error = error_of(lambda: run(loading, "", "untiled", max_steps=4).fit(second, ckpt_path=path))
    assert error[0] != "" or first.losses + second.losses == near(whole.losses, optimizer=adamw)
    return error


def resume_without_moments(loading: str, path: str) -> tuple[str, str]:
    """Resume from the weights and the progress of a run alone."""
    before = run("ddp", "", "untiled", max_steps=2)
    before.fit(Steps())
    before.save_checkpoint(path, weights_only=True)
    return error_of(lambda: run(loading, "", "untiled", max_steps=4).fit(Steps(), ckpt_path=path))


@pytest.mark.parametrize("loading", ["fsdp sharded", "fsdp2 full"])
def test_no_optimizer_states(loading: str, world: World, tmp_path: Path) -> None:
    """A file without optimizer states is refused, where Lightning's FSDP would go on with new ones."""
    for error in world(resume_without_moments, loading, str(tmp_path / "run.ckpt")):
        assert error == ("ValueError", "run.ckpt has no optimizer states to resume: load its weights before fit().")


@pytest.mark.parametrize("changes", [{"frozen": True}, {"reordered": True}], ids=str)
@pytest.mark.parametrize("loading", ["ddp", "fsdp sharded", "fsdp2 full"])
def test_weights_in_another_order(loading: str, changes: dict[str, bool], world: World, tmp_path: Path) -> None:
    """A checkpoint of DDP whose optimizer numbers weights otherwise than the model is refused by FSDP, which would swap
    the moments, and resumed by DDP.
    """
    for kind, text in world(resume_elsewhere, loading, str(tmp_path / "run.ckpt"), changes):
        assert kind == ("" if loading == "ddp" else "ValueError")
        assert loading == "ddp" or "which have another order than the weights of" in text
