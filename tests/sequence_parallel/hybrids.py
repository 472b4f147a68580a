"""Small causal models of transformers, among them those whose layers pass on a state from token to token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import without_dropout
from tests.sequence_parallel.models import VOCAB

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
_BOTH = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_DELTA |= {"linear_value_head_dim": 8, **_BOTH}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS |= {"shared_expert_intermediate_size": 32}
_KIMI = {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "sparse"], **_BOTH, **_EXPERTS}
_KIMI |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4, "v_head_dim": 8}
_KIMI |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_MAMBA_2 = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4}
_NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
_NEMOTRON |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 32, "topk_group": 1}
_CONV = {"layer_types": ["conv", "full_attention"]}
_SINKS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_ZAMBA = {"mamba_d_state": 8, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
_ZAMBA |= {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 16, "num_mem_blocks": 1}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": _DELTA,
    "kimi_linear": _KIMI,
    "bailing_hybrid": _KIMI,
    "nemotron_h": _NEMOTRON,
    "granitemoehybrid": {**_MAMBA_2, **_EXPERTS, **_BOTH, "shared_intermediate_size": 32},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 64},
    "zamba2": {**_ZAMBA, "hybrid_layer_ids": [1, 2]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "lfm2": {**_CONV, "block_auto_adjust_ff_dim": False, "block_ff_dim": 64},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": _CONV,
    "gpt_oss": {**_SINKS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Fields of configurations, by ``model_type``, of models that have layers with a state, convolutions or sinks."""


def causal(name: str, **fields: Any) -> Callable[[], nn.Module]:
    """Return what builds a small causal model of transformers in float64, without dropout, in training mode.

    Fields that are ``None`` are left out.
    """

    def build() -> nn.Module:
        import transformers

        given = {**_SIZES, **HYBRIDS.get(name, {}), **fields}
        given = {field: value for field, value in given.items() if value is not None}
        config = transformers.AutoConfig.for_model(name, **given)
        config._experts_implementation = "eager"
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config).double()
        if name == "gpt_oss":
            model.set_attn_implementation("eager")  # which has sinks
        return without_dropout(model)

    return build


class _Wide:
    """``torch`` with float64 in place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def wide(model: nn.Module) -> Iterator[None]:
    """Let a model's own code compute in float64 what it computes in float32, as its states."""
    files = {sys.modules[type(part).__module__] for part in model.modules() if "transformers" in type(part).__module__}
    narrow, typed = Tensor.float, Tensor.type

    def widened(tensor: Tensor, dtype: Any = None, **options: Any) -> Any:
        return typed(tensor, torch.float64 if dtype == torch.float32 else dtype, **options)

    for file in files:
        file.torch = _Wide()  # type: ignore[attr-defined]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    Tensor.type = widened  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.float = narrow  # type: ignore[method-assign]
        Tensor.type = typed  # type: ignore[method-assign]
        for file in files:
            file.torch = torch  # type: ignore[attr-defined]
