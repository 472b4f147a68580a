"""The Trainer of transformers with ``TiledCallback``, on the engines that Accelerate starts on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, default_data_collator
from transformers.integrations import unset_hf_deepspeed_config

from lt_tiled.transformers import TiledCallback, share_batches
from tests.callbacks.test_transformers import patches, trainer_of
from tests.engines.cells import zero
from tests.world import OnRanks, World

ENGINES = ("ddp", "zero1", "zero2", "zero3")
"""Accelerate ignores FSDP on the CPU and trains with DDP there."""


def arguments_of(engine: str) -> dict[str, Any]:
    """The TrainingArguments with which Accelerate takes an engine."""
    if engine == "ddp":
        return {}
    config = zero(engine) | {"gradient_accumulation_steps": "auto"}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return {"deepspeed": config}


class SharedTrainer(Trainer):
    """Both ranks get the same batches for training."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = DataLoader(self.train_dataset, 1, shuffle=True, collate_fn=default_data_collator)
        return share_batches(loader, 2)


def losses(engine: str, callback: dict[str, Any] | None, shared: bool = False) -> list[float]:
    """Three steps of two micro-batches, and an evaluation with a metric of the logits."""
    kept = None if callback is None else TiledCallback(**callback)
    evaluation = {"eval_strategy": "no"} if shared else {"eval_strategy": "steps", "eval_steps": 3}
    options = {"learning_rate": 1e-2, "max_grad_norm": 0, **evaluation, **arguments_of(engine)}
    with tempfile.TemporaryDirectory() as directory:
        kind = SharedTrainer if shared else Trainer
        trainer = trainer_of(Path(directory), [kept] if kept else [], kind, torch.float32, **options)
        trainer.train()
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}  # some engines gather on rank 0
    names = ("loss", "eval_loss", "eval_accuracy")
    found = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    if kept is not None:
        assert kept.report is not None
        assert kept.report.tiled[0].tiles == (callback or {}).get("tiling", 1)
        assert patches(trainer.model) == 0
    unset_hf_deepspeed_config()  # with which transformers would shard the models of later tests
    return [*found, *(float(weight.double().norm()) for weight in weights.values())]


TILED: dict[str, Any] = {"tiling": 3, "activation_checkpointing": True}


@pytest.mark.table("ddp|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_metrics(engine: str, on_ranks: OnRanks) -> None:
    """Three steps of two micro-batches with labels ignored unevenly, an evaluation in training whose metric reads the
    logits, and the weights have the figures of the Trainer alone, with the loss in tiles. The model is plain
    afterwards.
    """
    true = on_ranks(losses, engine, None)
    assert len(true[0]) > 5, "the weights are not among the figures"
    assert on_ranks(losses, engine, TILED | {"loss": 4}) == [pytest.approx(values, rel=1e-4) for values in true]


@pytest.mark.table("ddp")
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_shared_sequences(engine: str, on_ranks: OnRanks) -> None:
    """With a data loader of ``share_batches`` two ranks that share each sequence have the losses of two that each have
    all of it.
    """
    true = on_ranks(losses, engine, None, True)
    found = on_ranks(losses, engine, TILED | {"sequence_parallel": 2}, True)
    assert found == [pytest.approx(values, rel=1e-4) for values in true]


def drawn(size: int) -> list[int]:
    """The samples that a rank of four gets from a shuffled data loader, after Accelerate has prepared it as well."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    loader = share_batches(DataLoader(range(8), 1, shuffle=True), size)  # type: ignore[arg-type]
    return [int(batch) for batch in Accelerator(cpu=True).prepare(loader)]


def test_share_batches(four_ranks: World) -> None:
    """Groups of two ranks divide the samples, each taken once, and the ranks of a group draw the same."""
    first, second, third, fourth = four_ranks(drawn, 2)
    assert (first, third) == (second, fourth)
    assert sorted(first + third) == list(range(8))
    assert first != sorted(first)
