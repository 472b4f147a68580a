"""Trainers of TRL, which compute their losses from hidden states in chunks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from lt_tiled import prepare
from tests.models import tiny_llama

pytest.importorskip("trl")  # which Python 3.10 lacks
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`gradient_checkpointing")]  # which TRL sets


def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "])}
    characters = Tokenizer(models.WordLevel(letters, unk_token="a"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def train(kind: str, callback: dict[str, Any] | None, directory: Path, **options: Any) -> tuple[list[float], Any]:
    """Two steps of a trainer; return its losses and the model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from lt_tiled.transformers import TiledCallback

    torch.manual_seed(0)
    fields = {"use_cache": False, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 256}
    model, more = tiny_llama(**fields), {}
    texts = ["the quick brown fox jumps over the lazy dog " * 2, "pack my box with five dozen jugs "] * 4
    rows, trainer_of, config_of = {"text": texts}, SFTTrainer, SFTConfig
    if kind == "dpo":
        rows = {"prompt": texts, "chosen": [t[::-1] for t in texts], "rejected": [t[3:] for t in texts]}
        torch.manual_seed(1)
        more["ref_model"] = tiny_llama(**fields)
        if callback is not None:
            prepare(more["ref_model"], tiling=3)
        trainer_of, config_of = DPOTrainer, DPOConfig
    shared = {"max_steps": 2, "learning_rate": 1e-2, "optim": "sgd", "max_length": 96, "per_device_train_batch_size": 2}
    quiet = {"save_strategy": "no", "report_to": "none", "logging_steps": 1, "disable_tqdm": True}
    arguments = config_of(str(directory), use_cpu=True, bf16=False, **shared, **quiet, **options)
    kept = [] if callback is None else [TiledCallback(**callback)]
    data = {"train_dataset": Dataset.from_dict(rows), "processing_class": tokenizer()}
    trainer = trainer_of(model, args=arguments, callbacks=list(kept), **data, **more)
    trainer.train()
    for used in kept:
        assert used.report is not None
        assert used.report.tiled[0].tiles == 3
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


TILED = {"tiling": 3, "activation_checkpointing": True}


@pytest.mark.parametrize(
    ("kind", "options", "loss"),
    [
        ("sft", {}, 4),
        ("sft", {"loss_type": "dft"}, None),
        ("sft", {"packing": True, "gradient_checkpointing": False}, None),
        ("dpo", {}, 4),
    ],
)
def test_losses_and_weights(kind: str, options: dict[str, Any], loss: int | None, tmp_path: Path) -> None:
    """Two steps of ``SFTTrainer`` and ``DPOTrainer`` have the losses and weights of the trainer alone, with a tiled
    reference model too.
    """
    true, untiled = train(kind, None, tmp_path, **options)
    found, tiled = train(kind, TILED | {"loss": loss}, tmp_path, **options)
    assert found == pytest.approx(true, rel=1e-5)
    for weight, other in zip(tiled.parameters(), untiled.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)
