"""Real training runs with every byte booked, and predictions of the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from lt_tiled.planner.ledger import Ledger
from lt_tiled.planner.simulate import plan
from tests.lit import trainer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = {**LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192}
"""The model of real steps: its weights and the activations of ``TOKENS`` tokens take as many bytes as each other."""
TOKENS = 960


class Adapted(CausalLM):
    """With LoRA on attention and MLP, and frozen otherwise."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            targets = ["q_proj", "v_proj", "down_proj"]
            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))


class Watch(pl.Callback):
    """Reads the peak of the second step, which is like all that follow."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def on_train_batch_start(self, run: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 1:
            self.ledger.restart_peak()

    def on_train_batch_end(
        self, run: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 1:
            self.peak = self.ledger.peak


def measured(strategy: Any, module: type[CausalLM] = CausalLM, tokens: int = TOKENS, **kwargs: Any) -> int:
    """The peak of live bytes of a real step, from before the model was made.

    A plan leaves out the fingerprints, of up to 20 KiB a block, which are much next to a model as small as this.
    """
    with mock.patch("lt_tiled.recompute.compare.ROWS", 1), Ledger() as ledger:
        watch = Watch(ledger)
        run = trainer(
            strategy(),
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            callbacks=[watch],
            max_steps=2,
            limit_val_batches=0,
        )
        run.fit(module(**kwargs), datamodule=TextFiles(seq_len=tokens))
    return watch.peak


def predicted(strategy: Any, devices: int = 1, module: type[CausalLM] = CausalLM, **kwargs: Any) -> int:
    """The same without a run."""
    with torch.device("meta"):
        model = module(**kwargs)
    arguments = {"strategy": strategy(), "accelerator": "cpu", "devices": devices}
    return plan(make_job(model, TextFiles(seq_len=TOKENS), arguments)).peak
