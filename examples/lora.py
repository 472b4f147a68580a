"""Fine-tune a causal language model of Hugging Face with LoRA, on long context of your own text.

The LightningModule is an ordinary one with transformers and peft. The strategy runs the MLPs and the loss tile by tile
and turns on activation checkpointing. Model and tokenizer come from a local directory, as ``save_pretrained`` writes
them. It needs ``pip install 'lt-tiled[hf]' peft``.

    python examples/lora.py path/to/model "path/to/*.txt" --seq-len 32768
    python examples/lora.py path/to/model "path/to/*.txt" --seq-len 2048 --accelerator cpu --devices 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lt_tiled import TiledDDPStrategy, TiledSingleDeviceStrategy
from lt_tiled.callbacks import TilingReport
from lt_tiled.lm import TextFiles


class LoRA(L.LightningModule):
    """A causal language model that trains only its adapters."""

    def __init__(self, directory: Path, rank: int, learning_rate: float) -> None:
        super().__init__()
        base = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(base.train(), adapters)  # from_pretrained leaves it in evaluation mode
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            (weight for weight in self.parameters() if weight.requires_grad), lr=self.learning_rate
        )

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        # With labels, the model computes its loss itself, and the strategy can tile it.
        loss: Tensor = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        return loss


def main() -> None:
    """Train, and save the adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a local directory with a model and its tokenizer")
    parser.add_argument("text", help="a file, a directory or a glob")
    parser.add_argument("--output", type=Path, default=Path("adapter"), help="directory for the adapter")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--untiled", action="store_true", help="train without lt_tiled, to compare")
    args = parser.parse_args()

    L.seed_everything(1)
    model = LoRA(args.model, args.rank, args.learning_rate)
    data = TextFiles(args.text, tokenizer=str(args.model), seq_len=args.seq_len)
    tiled = TiledSingleDeviceStrategy if args.devices == 1 else TiledDDPStrategy
    trainer = L.Trainer(
        # activation_checkpointing="cpu" or "disk" also offloads the block inputs.
        strategy="auto" if args.untiled else tiled(activation_checkpointing=True, loss=True),
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.steps,
        num_sanity_val_steps=0,
        callbacks=[TilingReport()],
        enable_checkpointing=False,
        logger=False,
    )
    before = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    trainer.fit(model, data)
    after = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        model.model.save_pretrained(args.output)
        print(f"held-out loss {before:.5f} -> {after:.5f}; the adapter is in {args.output}")


if __name__ == "__main__":
    main()
