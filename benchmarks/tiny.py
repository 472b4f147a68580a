"""A tiny instance of any model of transformers: the fields of its configuration that have known names become small."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.sequence_parallel.hybrids import HYBRIDS, causal
from tests.sequence_parallel.models import VOCAB

HIDDEN, HEADS, HEAD, LAYERS = 32, 4, 8, 2
NAMES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    HIDDEN: """hidden_size n_embd d_model embedding_size word_embed_proj_dim dim embed_dim cross_attention_hidden_size
        encoder_hidden_dim attention_hidden_size""",
    2 * HIDDEN: """intermediate_size n_inner d_ff ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size dim_ff mlp_size block_ff_dim
        moe_shared_expert_intermediate_size dense_intermediate_size intermediate_size_mlp expert_ffn_hidden_size""",
    HEADS: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        swa_num_attention_heads index_n_heads linear_num_value_heads num_encoder_attention_heads
        num_decoder_attention_heads linear_num_heads num_experts num_local_experts n_routed_experts moe_num_experts
        rotary_dim""",
    HEAD: """head_dim swa_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim d_kv
        linear_key_head_dim linear_value_head_dim linear_head_dim kv_channels attention_head_dim sliding_window
        attention_chunk_size sliding_window_size attention_window_size window_size local_attention
        hidden_size_per_layer_input laurel_rank""",
    2 * HEAD: "kv_lora_rank q_lora_rank o_lora_rank",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_key_value_heads swa_num_key_value_heads num_global_key_value_heads linear_num_key_heads
        num_experts_per_tok moe_topk moe_k num_experts_per_token moe_top_k top_k_experts experts_per_token""",
    1: """n_group topk_group num_expert_group first_k_dense_replace n_shared_experts num_shared_experts
        num_dense_layers moe_num_shared_experts decoder_sparse_step""",
    256: "max_position_embeddings n_positions max_seq_len model_max_length",
    0: "pad_token_id num_nextn_predict_layers num_kv_shared_layers",
    3: "bos_token_id eos_token_id decoder_start_token_id",
}
SMALL = {name: value for value, names in NAMES.items() for name in names.split()}
"""The value of each field that a configuration has by such a name."""
OTHERS: dict[str, dict[str, Any]] = {  # what the configurations of some models need besides, by their model_type
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4, "ngram_vocab_size_base": VOCAB, "split_ngram_parts": 1},
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "rembert": {"vocab_size": VOCAB, "input_embedding_size": HIDDEN, "output_embedding_size": HIDDEN},
    "roc_bert": {"pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB},
    "xglm": {"attention_heads": HEADS},
    "xlm": {"n_words": VOCAB, "emb_dim": HIDDEN},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_model(model_type: str) -> nn.Module:
    """Return a small causal model in float64 with random weights, without dropout or jitter, in training mode."""
    if model_type in HYBRIDS:
        return causal(model_type)()
    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(**fields_of(config_class))
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"
        if hasattr(part, "is_decoder") and not getattr(part, "is_encoder_decoder", False):
            part.is_decoder = True
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).double().train()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    return model


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a small configuration of a class."""
    defaults = defaults_of(kind)
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        if isinstance(default, float) and ("drop" in name or "jitter" in name):
            fields[name] = 0.0  # so that two runs can be compared
        elif name in SMALL and not isinstance(default, list | tuple | dict):
            fields[name] = SMALL[name]
    fields |= layers_of(defaults)
    for name, inner in kind.sub_configs.items():
        if hasattr(inner, "sub_configs"):  # AutoConfig has none
            fields[name] = fields_of(inner)
        elif isinstance(defaults.get(name), dict):
            found = type(getattr(kind(), name))
            fields[name] = fields_of(found) | {"model_type": found.model_type}
    if "kv_lora_rank" in defaults:
        fields["num_key_value_heads"] = HEADS  # latent attention has keys for each head
    return fields | OTHERS.get(kind.model_type, {})


def defaults_of(kind: Any) -> dict[str, Any]:
    try:
        return dict(kind().to_dict())
    except Exception:  # some defaults do not fit together
        parameters = inspect.signature(kind).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters}


def layers_of(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that name a kind for each layer, with each kind once in the order of the defaults."""
    kinds = {}
    for name, value in defaults.items():
        of_layers = isinstance(value, list) and len(value) == defaults.get("num_hidden_layers")
        if of_layers and all(isinstance(kind, str) for kind in value):
            kinds[name] = list(dict.fromkeys(value))
    if not kinds:
        return {}
    layers = max(LAYERS, *map(len, kinds.values()))
    padded = {name: names + names[-1:] * (layers - len(names)) for name, names in kinds.items()}
    return {"num_hidden_layers": layers, **padded}
