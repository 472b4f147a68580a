"""What blocks keep for their recompute, and what it saves: ``python -m benchmarks --only keep``.

One training step of a small Llama at a length at which attention dominates, as it does for Llama 3 8B on 128K tokens:
FLOPs against those of the step without lt_tiled, bytes alive at the peak and offloaded bytes, measured and as
``lt-tiled plan`` predicts them. These figures are the same in every run on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from benchmarks.longest import QUIET
from benchmarks.sheet import Cell, Sheet
from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from lt_tiled.planner.ledger import Ledger
from lt_tiled.report import Report

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
TOKENS = 2048
"""Times the hidden size as many as 128K are for Llama 3 8B."""
NEAR = 0.02
KEEPS: list[Literal["attention", "attention_output"] | None] = [None, "attention_output", "attention"]


@dataclass(frozen=True)
class Figures:
    """Of one step."""

    flops: int
    peak: int
    offloaded: int


class _Last(pl.Callback):
    """Reads the figures of the last step. In the first two, recomputes are compared with their forward pass."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.offloaded = ledger, [0, 0]

    def on_train_batch_start(self, run: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.before = self.ledger.work
        self.ledger.restart_peak()

    def on_train_batch_end(
        self, run: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        moved = Report.of(module).offloaded
        self.offloaded.append(0 if moved is None else moved.cpu_bytes)
        self.flops, self.peak = (self.ledger.work - self.before).flops, self.ledger.peak

    @property
    def figures(self) -> Figures:
        return Figures(self.flops, self.peak, self.offloaded[-1] - self.offloaded[-2])


def measured(checkpointing: ActivationCheckpointing | Literal[False], tiling: bool = True) -> Figures:
    """Return the figures of a real step."""
    with Ledger() as ledger:
        callback = _Last(ledger)
        trainer = pl.Trainer(
            strategy=TiledSingleDeviceStrategy(tiling=tiling, activation_checkpointing=checkpointing),
            accelerator="cpu",
            devices=1,
            callbacks=[callback],
            max_steps=3,
            limit_val_batches=0,
            **QUIET,
        )
        trainer.fit(CausalLM(MODEL, loss=3), datamodule=TextFiles(seq_len=TOKENS))
    return callback.figures


def predicted(checkpointing: ActivationCheckpointing) -> Figures:
    """Return the figures that a plan has."""
    with torch.device("meta"):
        model = CausalLM(MODEL, loss=3)
    strategy = TiledSingleDeviceStrategy(activation_checkpointing=checkpointing)
    run = make_job(
        model, TextFiles(seq_len=TOKENS), {"strategy": strategy, "accelerator": "cpu", "devices": 1}
    ).simulate()
    return Figures(run.flops, run.peak, run.offloaded.cpu_bytes if run.offloaded is not None else 0)


def keep() -> list[Sheet]:
    """One row for what is kept, and where."""
    headings = ["keep", "block inputs", "FLOPs", "live bytes", "predicted", "offloaded bytes", "predicted"]
    sheet = Sheet("keep", "what blocks keep for their recompute", headings)
    sheet.notes = [
        f"Llama, {MODEL['num_hidden_layers']} layers of {MODEL['hidden_size']}, {TOKENS} tokens, float32. FLOPs"
        f" relative to the step without lt_tiled; ✓ predicted within {NEAR:.0%}."
    ]
    least = measured(False, tiling=False).flops
    for offload in (None, "cpu"):
        for what in KEEPS:
            policy = ActivationCheckpointing(keep=what, offload=offload, prefetch=1)
            real, plan = measured(policy), predicted(policy)
            pairs = ((real.peak, plan.peak), (real.offloaded, plan.offloaded))
            (live, live_plan), (moved, moved_plan) = ((f"{r:,}", _near(r, p)) for r, p in pairs)
            where = "in CPU memory" if offload else "on the device"
            sheet.add(str(what), where, f"{real.flops / least:.3f}", live, live_plan, moved, moved_plan)
    return [sheet]


def _near(real: int, predicted: int) -> Cell:
    return Cell(f"{predicted:,}", abs(predicted - real) <= NEAR * real)
