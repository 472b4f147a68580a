"""Predict the longest sequence of Llama-8B on one H200, feature by feature, and print published lengths for comparison.

Run ``python -m benchmarks.ladder`` (minutes on two cores; the weights are not in memory). Every row has activation
checkpointing, ZeRO-3 on one GPU, and weights and optimizer state in CPU memory, as in the published runs
(arXiv:2506.13996, section 5).
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lt_tiled import ActivationCheckpointing, TiledDeepSpeedStrategy, Tiling
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.memory import gib
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.search import longest

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TILE = 32768
LARGEST = "largest parts at the peak"
RUNGS: list[tuple[str, dict[str, Any], bool, str]] = [
    ("activation checkpointing", {"tiling": None, "activation_checkpointing": ActivationCheckpointing()}, False, "65K"),
    (
        "+ tiled loss",
        {"loss": "auto", "tiling": None, "activation_checkpointing": ActivationCheckpointing()},
        True,
        "300K",
    ),
    (
        "+ block inputs in CPU memory",
        {"loss": "auto", "tiling": None, "activation_checkpointing": ActivationCheckpointing(offload="cpu")},
        True,
        "650K",
    ),
    (
        "+ tiled MLP",
        {
            "loss": "auto",
            "tiling": Tiling(tile_tokens=TILE, targets="mlp"),
            "activation_checkpointing": ActivationCheckpointing(offload="cpu"),
        },
        True,
        "1.2M",
    ),
    (
        "+ tiled norms (the default)",
        {
            "loss": "auto",
            "tiling": Tiling(),
            "activation_checkpointing": ActivationCheckpointing(offload="cpu"),
        },
        True,
        "",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=141e9, help="bytes")
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.WARNING)
    table = Table(title=f"Llama-8B, bfloat16, on {args.memory / 1e9:.0f} GB", caption_justify="left")
    for heading in ("", "predicted", "published", LARGEST):
        table.add_column(heading, justify="left" if heading in ("", LARGEST) else "right", no_wrap=heading != LARGEST)
    for name, settings, tiled, published in RUNGS:
        job = job_of(tiled, args.layers)
        found = longest(job, int(args.memory), replace(job.settings, **settings), granule=4096, tokens=32768)
        parts = sorted(found.parts.items(), key=lambda item: -item[1])[:4]
        largest = ", ".join(f"{part} {gib(nbytes)}" for part, nbytes in parts)
        table.add_row(name, f"{found.tokens / 1024:.0f}K", published, f"{largest}; in the {found.phase}")
    Console().print(table)


def job_of(loss: bool, layers: int) -> Job:
    """The run."""
    with torch.device("meta"):
        module = CausalLM({**LLAMA_8B, "num_hidden_layers": layers}, loss=loss)
    strategy = TiledDeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)
    return make_job(module, TextFiles(), {"strategy": strategy, "precision": "bf16-true", "devices": 1})


if __name__ == "__main__":
    main()
