"""The peak of a step by default settings against what attention needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_tiled import TiledSingleDeviceStrategy
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from lt_tiled.planner.simulate import plan

pytestmark = pytest.mark.slow

LAYERS, TOKENS = 4, 2**20
SIZES = {"vocab_size": 256, "num_hidden_layers": LAYERS, "max_position_embeddings": TOKENS}
LLAMA = {**SIZES, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "Llama 3": ({**LLAMA, "model_type": "llama", "intermediate_size": 14336}, 1.01),
    "Qwen 3": ({**LLAMA, "model_type": "qwen3", "intermediate_size": 12288, "head_dim": 128}, 1.14),
    "GPT-2": (
        {
            "model_type": "gpt2",
            "vocab_size": 256,
            "n_embd": 1600,
            "n_layer": LAYERS,
            "n_head": 25,
            "n_positions": TOKENS,
        }
        | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
        1.16,
    ),
    # The norms of its queries and keys save their inputs, 6 GiB, and so does the norm behind attention, 5 GiB.
    "Gemma 3": (
        {
            **SIZES,
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": TOKENS + 1,  # sdpa would make a mask of all scores
        },
        1.24,
    ),
}


def floor(config: dict[str, Any]) -> int:
    """Bytes in bfloat16: the block's input, q, k, v, the output of attention and their gradients, and the inputs of the
    other blocks.
    """
    hidden = config.get("hidden_size", config.get("n_embd"))
    heads = config.get("num_attention_heads", 1)
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    return 2 * TOKENS * (2 * (hidden + 2 * queries + 2 * keys) + (LAYERS - 1) * hidden)


@pytest.mark.table("Llama 3")
@pytest.mark.parametrize("name", MODELS)
def test_floor(name: str) -> None:
    """By default settings the live bytes of a step's activations are at most these times the floor."""
    config, bound = MODELS[name]
    with torch.device("meta"):
        module = CausalLM(config)
    settings = {"strategy": TiledSingleDeviceStrategy(), "accelerator": "cpu", "precision": "bf16-true"}
    job = make_job(module, TextFiles(seq_len=2048), settings)
    found = plan(job, TOKENS)
    weights = ("weights", "gradients", "optimizer")
    assert sum(nbytes for part, nbytes in found.parts.items() if part not in weights) <= bound * floor(config)
