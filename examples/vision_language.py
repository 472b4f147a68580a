"""Train a vision-language model of Hugging Face on two devices, sharded by FSDP.

An image becomes hundreds of tokens. The strategy runs the MLPs of both towers and the loss tile by tile. The model is a
LLaVA from a local directory, or a small one with random weights. It needs ``pip install 'lt-tiled[hf]' pillow``.

    python examples/vision_language.py --model path/to/llava
    python examples/vision_language.py --accelerator cpu
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers as hf
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lt_tiled import TiledFSDPStrategy
from lt_tiled.callbacks import TilingReport

HALVES = {"left": (0, 0, 32, 64), "right": (32, 0, 64, 64), "upper": (0, 0, 64, 32), "lower": (0, 32, 64, 64)}


class Pictures(Dataset[tuple[Image.Image, str]]):
    """Drawings of one colored half, each with a sentence about it. Put your own images and texts here."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        draw = random.Random(self.seeds[index])
        color, half = draw.choice(("red", "green", "blue", "black")), draw.choice(list(HALVES))
        image = Image.new("RGB", (64, 64), "white")
        image.paste(color, HALVES[half])
        return image, f"The {half} half is {color}."


class VisionLanguage(L.LightningModule):
    """A LLaVA that learns the texts. Its vision tower is frozen."""

    def __init__(self, model: hf.LlavaForConditionalGeneration, learning_rate: float) -> None:
        super().__init__()
        self.model: Any = model
        self.model.model.vision_tower.requires_grad_(False)
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            (weight for weight in self.parameters() if weight.requires_grad), lr=self.learning_rate
        )


def build(directory: Path | None) -> tuple[hf.LlavaForConditionalGeneration, Any]:
    """Load a LLaVA and its processor.

    Without a directory, build a small one with random weights, bytes as tokens and 256 patches per image.
    """
    if directory is not None:
        model = hf.LlavaForConditionalGeneration.from_pretrained(directory, local_files_only=True)
        return model.train(), hf.AutoProcessor.from_pretrained(directory, local_files_only=True)
    alphabet = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = hf.GPT2Tokenizer(alphabet, [], pad_token="<pad>", additional_special_tokens=["<image>"])
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**sizes, image_size=64, patch_size=4),
        text_config=hf.LlamaConfig(**sizes, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.get_vocab()["<image>"],
    )
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    patches = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return hf.LlavaForConditionalGeneration(config), hf.LlavaProcessor(images, tokenizer, **patches)


def main() -> None:
    """Train, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a local directory with a LLaVA and its processor")
    parser.add_argument("--output", type=Path, default=Path("vision_language.ckpt"))
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--untiled", action="store_true", help="train with stock DDP, to compare")
    args = parser.parse_args()

    L.seed_everything(1)
    model, processor = build(args.model)

    def collate(samples: list[tuple[Image.Image, str]]) -> dict[str, Tensor]:
        texts = [f"{processor.image_token}\n{text}" for _, text in samples]
        batch = dict(processor(images=[image for image, _ in samples], text=texts, padding=True, return_tensors="pt"))
        said = batch["attention_mask"].bool() & (batch["input_ids"] != processor.image_token_id)
        return batch | {"labels": batch["input_ids"].where(said, -100)}  # only the text counts in the loss

    train = DataLoader(Pictures(range(1000)), args.batch_size, shuffle=True, collate_fn=collate)
    held_out = DataLoader(Pictures(range(1000, 1032)), args.batch_size, collate_fn=collate)
    lit = VisionLanguage(model, args.learning_rate)
    trainer = L.Trainer(
        strategy="ddp" if args.untiled else TiledFSDPStrategy(loss=True),
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.steps,
        num_sanity_val_steps=0,
        callbacks=[TilingReport()],
        enable_checkpointing=False,
        logger=False,
    )
    before = trainer.validate(lit, held_out, verbose=False)[0]["val_loss"]
    trainer.fit(lit, train, held_out)
    after = trainer.validate(lit, held_out, verbose=False)[0]["val_loss"]
    trainer.save_checkpoint(args.output, weights_only=True)  # on every rank, because each has a shard
    trainer.print(f"held-out loss {before:.5f} -> {after:.5f}; the weights are in {args.output}")


if __name__ == "__main__":
    main()
