"""Predictions against the allocator of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_tiled import Checkpointing, TiledSingleDeviceStrategy, Tiling
from lt_tiled.callbacks import MemoryMonitor
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from tests.lit import trainer

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_four_layers_of_llama_8b(tokens: int, offload: Any) -> None:
    """``max_memory_allocated`` of real steps is within 5 % of the prediction."""
    policies: dict[str, Any] = {"tiling": Tiling(), "checkpointing": Checkpointing(offload=offload), "loss": True}
    data, monitor = TextFiles(seq_len=tokens), MemoryMonitor()
    with torch.device("meta"):
        planned = CausalLM(LLAMA_8B)
    strategy = TiledSingleDeviceStrategy(**policies)
    predicted = (
        make_job(planned, data, {"strategy": strategy, "accelerator": "gpu", "precision": "bf16-true"}).simulate().peak
    )
    options: dict[str, Any] = {
        "accelerator": "gpu",
        "precision": "bf16-true",
        "callbacks": [monitor],
        "limit_val_batches": 0,
    }
    run = trainer(TiledSingleDeviceStrategy(**policies), max_steps=3, **options)
    run.fit(CausalLM(LLAMA_8B), datamodule=data)
    assert predicted == pytest.approx(monitor.peak, rel=0.05)
