"""Small random instances of architectures from transformers, each with inputs that give a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, VOCAB = 2, 64, 64
H, WIDE, HEADS = 32, 192, 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": H // HEADS,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": H, "n_layer": 2, "n_head": HEADS, "n_inner": WIDE, "n_positions": LENGTH}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDE}
_VISION: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 64,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Architecture:
    """One row of the table: how to build it, what it is fed, and what ``auto`` must find."""

    model: str
    config: str
    fields: dict[str, Any]
    finds: dict[str, str]
    """Path, with stars for numbers, to class."""
    inputs: Callable[[Any], dict[str, torch.Tensor]] | None = None
    error: float = 1e-9
    """Relative, in float64; more where the model computes a part in float32 whatever its weights are."""

    def build(self, dtype: torch.dtype = torch.float64, experts: str = "eager") -> nn.Module:
        """A model without dropout, in training mode.

        Args:
            dtype: Of its weights.
            experts: How transformers computes a mixture of experts.
        """
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.fields)
        config._experts_implementation = experts
        model = getattr(transformers, self.model)(config).to(dtype).train()
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and (name == "p" or "drop" in name):
                    setattr(module, name, 0.0)
        return model

    def feed(self, model: Any) -> dict[str, torch.Tensor]:
        """Inputs with labels."""
        return (self.inputs or _text)(model)


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(1))


def _text(model: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


def _sequence_to_sequence(model: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids(LENGTH)}


def _pixels(model: Any, channels: int = 3) -> torch.Tensor:
    return torch.randn(BATCH, channels, 64, 64, generator=torch.Generator().manual_seed(2)).to(model.dtype)


def _images(model: Any) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(model), "labels": torch.tensor([0, 1])}


def _speech(model: Any) -> dict[str, torch.Tensor]:
    sound = torch.randn(BATCH, 16, 2 * LENGTH, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    return {"input_features": sound, "labels": _ids()}


def _gemma3_images(model: Any) -> dict[str, torch.Tensor]:
    ids = _ids()
    ids[:, 4:20] = model.config.image_token_id
    kinds = (ids == model.config.image_token_id).long()
    return {
        "input_ids": ids,
        "labels": _ids(),
        "pixel_values": _pixels(model),
        "token_type_ids": kinds,
        "attention_mask": torch.ones_like(ids),
    }


def _qwen3_vl_images(model: Any) -> dict[str, torch.Tensor]:
    ids = _ids()
    ids[:, 4:20] = model.config.image_token_id
    patches = torch.randn(BATCH * 64, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    grid = torch.tensor([[1, 8, 8]] * BATCH)
    kinds = (ids == model.config.image_token_id).int()
    return {
        "input_ids": ids,
        "labels": _ids(),
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def _causal(name: str, mlp: str, path: str = "model.layers.*.mlp", error: float = 1e-9, **fields: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", {**_SIZES, **fields}, {path: mlp}, error=error)


_DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_DEEPSEEK |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK |= {"moe_intermediate_size": WIDE, "num_key_value_heads": HEADS}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": H,
    "d_ff": WIDE,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "vocab_size": VOCAB,
    "d_model": H,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_mel_bins": 16,
    "max_source_positions": LENGTH,
}
_WHISPER |= {
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE,
}
_WHISPER |= {
    "max_target_positions": LENGTH,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BART = {"vocab_size": VOCAB, "d_model": H, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": LENGTH}
_BART |= {
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE,
}
_OPT = {"ffn_dim": WIDE, "word_embed_proj_dim": H}
_QWEN3_VL = {
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "text_config": _SIZES,
}
_QWEN3_VL |= {
    "vision_config": {
        "depth": 2,
        "hidden_size": H,
        "intermediate_size": WIDE,
        "num_heads": HEADS,
        "patch_size": 8,
        "out_hidden_size": H,
    }
}
_QWEN3_VL["vision_config"] |= {"spatial_merge_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}

ARCHITECTURES: dict[str, Architecture] = {
    "Llama": _causal("Llama", "LlamaMLP"),
    "Qwen 2": _causal("Qwen2", "Qwen2MLP"),
    "Qwen 3": _causal("Qwen3", "Qwen3MLP"),
    "Mistral": _causal("Mistral", "MistralMLP"),
    "Phi-3": _causal("Phi3", "Phi3MLP"),
    "Phi": _causal("Phi", "PhiMLP"),
    "Gemma": _causal("Gemma", "GemmaMLP", error=1e-6),
    "Gemma 2": _causal("Gemma2", "Gemma2MLP", error=1e-6),
    "Gemma 3": Architecture(
        "Gemma3ForCausalLM", "Gemma3TextConfig", _SIZES, {"model.layers.*.mlp": "Gemma3MLP"}, error=1e-6
    ),
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config", _GPT2, {"transformer.h.*.mlp": "GPT2MLP"}),
    "GPT-J": Architecture(
        "GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}, {"transformer.h.*.mlp": "GPTJMLP"}, error=1e-6
    ),
    "GPT-NeoX": _causal("GPTNeoX", "GPTNeoXMLP", "gpt_neox.layers.*.mlp"),
    "OPT": Architecture("OPTForCausalLM", "OPTConfig", _SIZES | _OPT, {}),
    "OPT, post-norm": Architecture("OPTForCausalLM", "OPTConfig", _SIZES | _OPT | {"do_layer_norm_before": False}, {}),
    "Falcon": Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        {name: value for name, value in _SIZES.items() if name != "head_dim"} | {"ffn_hidden_size": WIDE},
        {"transformer.h.*.mlp": "FalconMLP"},
    ),
    "BLOOM": _causal("Bloom", "BloomMLP", "transformer.h.*.mlp", n_head=HEADS, n_layer=2),
    "MPT": Architecture(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": H, "n_heads": 1, "n_layers": 2, "max_seq_len": LENGTH},
        {"transformer.blocks.*.ffn": "MptMLP"},
    ),
    "OLMo 2": _causal("Olmo2", "Olmo2MLP"),
    "GLM-4": _causal("Glm4", "Glm4MLP"),
    "Cohere": _causal("Cohere", "CohereMLP"),
    "Granite": _causal("Granite", "GraniteMLP"),
    "EXAONE 4": _causal("Exaone4", "Exaone4MLP"),
    "SmolLM 3": _causal("SmolLM3", "SmolLM3MLP"),
    "StarCoder 2": _causal("Starcoder2", "Starcoder2MLP"),
    "Mixtral": _causal("Mixtral", "MixtralSparseMoeBlock", **_EXPERTS),
    "Qwen 2 MoE": _causal("Qwen2Moe", "Qwen2MoeSparseMoeBlock", **_EXPERTS, shared_expert_intermediate_size=WIDE),
    "Qwen 3 MoE": _causal("Qwen3Moe", "Qwen3MoeSparseMoeBlock", **_EXPERTS),
    "GPT-OSS": _causal("GptOss", "GptOssMLP", **_EXPERTS),
    "DeepSeek V3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_SIZES, **_DEEPSEEK},
        {"model.layers.*.mlp": "DeepseekV3MLP, DeepseekV3MoE"},
        error=1e-6,
    ),
    "OLMoE": _causal("Olmoe", "OlmoeSparseMoeBlock", **_EXPERTS),
    "Granite MoE": _causal("GraniteMoe", "GraniteMoeMoE", "model.layers.*.block_sparse_moe", **_EXPERTS),
    "Llama 4 (text)": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_SIZES, **_EXPERTS, "intermediate_size_mlp": WIDE, "interleave_moe_layer_step": 2},
        {"model.layers.*.feed_forward": "Llama4TextMLP, Llama4TextMoe"},
    ),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        {f"{stack}.block.*.layer.*": "T5LayerFF" for stack in ("encoder", "decoder")},
        _sequence_to_sequence,
    ),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", _BART, {}, _sequence_to_sequence),
    "BERT": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        _SIZES,
        {"bert.encoder.layer.*.feed_forward_chunk": "BertLayer.feed_forward_chunk"},
    ),
    "RoBERTa": Architecture(
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**_SIZES, "max_position_embeddings": LENGTH + 2},
        {"roberta.encoder.layer.*.feed_forward_chunk": "RobertaLayer.feed_forward_chunk"},
    ),
    "ViT": Architecture("ViTForImageClassification", "ViTConfig", _VISION, {"vit.layers.*.mlp": "ViTMLP"}, _images),
    "Whisper": Architecture("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, {}, _speech),
    "Qwen 3-VL": Architecture(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        _QWEN3_VL,
        {"model.visual.blocks.*.mlp": "Qwen3VLVisionMLP", "model.language_model.layers.*.mlp": "Qwen3VLTextMLP"},
        _qwen3_vl_images,
    ),
    "Gemma 3 (image and text)": Architecture(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": _SIZES, "vision_config": _VISION, "mm_tokens_per_image": 16, "image_token_id": 1},
        {"model.vision_tower.encoder.layers.*.mlp": "SiglipMLP", "model.language_model.layers.*.mlp": "Gemma3MLP"},
        _gemma3_images,
        error=1e-6,
    ),
}
