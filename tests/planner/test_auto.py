"""``num_shards="auto"`` against more and fewer tiles, by the planner's exact figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_tiled import Checkpointing, TiledSingleDeviceStrategy, Tiling
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from lt_tiled.planner.search import plan

SIZES = {"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3": {**SIZES, "model_type": "llama", "intermediate_size": 896, "num_key_value_heads": 1},
    "Qwen 2.5": {**SIZES, "model_type": "qwen2", "intermediate_size": 1364, "num_key_value_heads": 1},
    "GPT-NeoX": {**SIZES, "model_type": "gpt_neox", "intermediate_size": 1024},
    "Gemma": {**SIZES, "model_type": "gemma", "intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 64},
}


@pytest.mark.parametrize("name", MODELS)
def test_more_tiles_save_little(name: str) -> None:
    """With ``auto`` the peak of long sequences is within 5 % of that with twice as many tiles, and far below one's."""
    with torch.device("meta"):
        module = CausalLM(MODELS[name])
    job = make_job(
        module,
        TextFiles(seq_len=2048),
        {"strategy": TiledSingleDeviceStrategy(), "accelerator": "cpu", "precision": "bf16-true"},
    )
    peaks = {
        shards: plan(job, 32768, job.settings.__class__(Tiling(shards), Checkpointing(), "auto")).peak
        for shards in ("auto", 1, 64)
    }
    assert peaks["auto"] <= 1.05 * peaks[64]
    assert peaks["auto"] < 0.6 * peaks[1]
