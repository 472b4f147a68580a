"""Small random instances of architectures from transformers, as different from each other as transformers has them,
each with inputs that give a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models import without_dropout

BATCH, LENGTH, VOCAB = 2, 64, 64
H, WIDE, HEADS = 32, 192, 4

_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "pad_token_id": 0, "max_position_embeddings": LENGTH, "attention_dropout": 0.0},
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim"], H),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"], WIDE),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], WIDE),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], HEADS),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], HEADS),
    **{"num_key_value_heads": 2, "head_dim": H // HEADS, "d_kv": 8, "n_positions": LENGTH, "max_seq_len": LENGTH},
    # Experts, and latent attention
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": WIDE, "shared_expert_intermediate_size": WIDE, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    # Mamba 2 and delta rules
    **{"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""The sizes, by each of the names that configs of transformers have for them. A config ignores those of others."""
_VISION = {**_SIZES, "image_size": 64, "patch_size": 8}


@dataclass(frozen=True)
class Architecture:
    """One row of the table: how to build it, and what it is fed."""

    model: str
    config: str
    fields: dict[str, Any]
    """Those of the config; ``None`` leaves one of the sizes out."""
    finds: bool = True
    """Whether ``auto`` finds MLPs. ``docs/models.md`` says which."""
    inputs: Callable[[Any], dict[str, torch.Tensor]] | None = None
    error: float = 1e-7
    """Relative, in float64; more where the model computes a part in float32 whatever its weights are."""
    more_flops: str = ""
    """Why tiling adds FLOPs to a step with activation checkpointing, where it does: mostly because the recompute of a
    block needs the output of its MLP ("it"), which is then computed once more, or its last projection is.
    """

    def build(self, dtype: torch.dtype = torch.float64, experts: str = "eager") -> nn.Module:
        """A model without dropout, in training mode.

        Args:
            dtype: Of its weights.
            experts: How transformers computes a mixture of experts.
        """
        import transformers

        torch.manual_seed(0)
        fields = {name: value for name, value in self.fields.items() if value is not None}
        config = getattr(transformers, self.config)(**fields)
        config._experts_implementation = experts
        return without_dropout(getattr(transformers, self.model)(config).to(dtype))

    def feed(self, model: Any) -> dict[str, torch.Tensor]:
        """Inputs with labels."""
        return (self.inputs or _text)(model)


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def _text(model: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


def _floats(model: Any, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(model.dtype)


def _pixels(model: Any) -> torch.Tensor:
    return _floats(model, BATCH, 3, 64, 64)


def _classified(name: str, *shape: int) -> Callable[[Any], dict[str, torch.Tensor]]:
    """Return what gives a model inputs of a shape under a name, and classes."""
    return lambda model: {name: _floats(model, BATCH, *shape), "labels": torch.tensor([0, 1])}


def _images_in_text(model: Any) -> dict[str, torch.Tensor]:
    ids = _ids()
    ids[:, 4:20] = model.config.image_token_id
    return {"input_ids": ids, "labels": _ids(), "pixel_values": _pixels(model)}


def _images_beside_text(model: Any) -> dict[str, torch.Tensor]:
    one = torch.ones(BATCH, 1, dtype=torch.int64)
    kinds = {"aspect_ratio_ids": one, "aspect_ratio_mask": one[..., None]}
    seen = torch.ones(BATCH, LENGTH, 1, 1, dtype=torch.int64)
    return {**_text(model), **kinds, "pixel_values": _pixels(model)[:, None, None], "cross_attention_mask": seen}


def _qwen3_vl_images(model: Any) -> dict[str, torch.Tensor]:
    inputs = _images_in_text(model)
    patches = _floats(model, BATCH * 64, 3 * 2 * 8 * 8)
    kinds = (inputs["input_ids"] == model.config.image_token_id).int()
    grid = torch.tensor([[1, 8, 8]] * BATCH)
    return {**inputs, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def _of(model: str, config: str = "", finds: bool = True, error: float = 1e-7, **more: Any) -> Architecture:
    """Return a row of a class of transformers. Its config is named as the class is, unless another one is given."""
    inputs, why, base = more.pop("inputs", None), more.pop("more_flops", ""), more.pop("base", _SIZES)
    config = config or model.partition("For")[0] + "Config"
    return Architecture(model, config, {**base, **more}, finds, inputs, error, why)


def _causal(name: str, config: str = "", **more: Any) -> Architecture:
    return _of(f"{name}ForCausalLM", config, **more)


def _masked(name: str, **more: Any) -> Architecture:
    return _of(f"{name}ForMaskedLM", **more)


def _vision(name: str, **more: Any) -> Architecture:
    given = {"base": _VISION, "inputs": _classified("pixel_values", 3, 64, 64), **more}
    return _of(f"{name}ForImageClassification", **given)


def _seq2seq(name: str, **more: Any) -> Architecture:
    return _of(f"{name}ForConditionalGeneration", **more)


_LLAMA_4 = {"intermediate_size_mlp": WIDE, "interleave_moe_layer_step": 2}
_MOBILE_BERT = {"embedding_size": H, "intra_bottleneck_size": 16, "num_feedforward_networks": 2}
_SEES = {"depth": 2, "hidden_size": H, "intermediate_size": WIDE, "num_heads": HEADS, "patch_size": 8}
_SEES |= {"out_hidden_size": H, "spatial_merge_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
_QWEN3_VL = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
_QWEN3_VL |= {"text_config": _SIZES, "vision_config": _SEES}
_ZAMBA_2 = {"mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1}
_ZAMBA_2 |= {"hybrid_layer_ids": [0, 1], "layers_block_type": ["hybrid", "hybrid"]}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA |= {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_expand": 1}
_GEMMA_3N = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
_GEMMA_3N |= {"laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA_3N |= {"activation_sparsity_pattern": [0.9, 0.0]}
_WAV2VEC2: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (5, 2)}
_WAV2VEC2 |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
_WAV2VEC2 |= {"classifier_proj_size": 8, "apply_spec_augment": False, "layerdrop": 0.0}
_SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_attention_heads": [2, 4]}
_SWIN |= {"image_size": 64, "patch_size": 8}
_LEVIT = {"patch_size": None, "hidden_sizes": [16, 16, 32], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1]}
_LEVIT |= {"key_dim": [8] * 3}
_LLAVA = {"text_config": {**_SIZES, "model_type": "llama"}, "image_token_id": 1}
_LLAVA |= {"vision_config": {**_VISION, "patch_size": 16, "model_type": "clip_vision_model"}}
_MLLAMA = {"text_config": {**_SIZES, "cross_attention_layers": [1]}, "image_token_index": 1}
_CROSS = {"hidden_size": H, "intermediate_size": WIDE, "num_hidden_layers": 2, "num_global_layers": 1}
_CROSS |= {"attention_heads": HEADS, "image_size": 64, "patch_size": 8, "max_num_tiles": 1, "vision_output_dim": 2 * H}
_CROSS |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
_MLLAMA |= {"vision_config": _CROSS}
_IN_TURN = ["linear_attention", "full_attention"]
_DEEPSEEK = {"first_k_dense_replace": 1, "num_key_value_heads": HEADS}
_GRANITE_4 = {"shared_intermediate_size": WIDE, "layer_types": ["mamba", "attention"]}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
_SOUND = _classified("input_values", 10 * LENGTH)
_LAST = "it does not end in an `nn.Linear`"
_POST_NORM = "the norm of the sum with the residual reads it"
_BEFORE_EXPERTS = "the shared expert, which runs after the routed ones, is a module of its own"
_ALT_UP = "AltUp and the per-layer inputs read it"
_GATE = "the gate of a cross-attention layer reads it"
_LAYER_SCALE = "the gradient of its scale, which is no module, reads it"

ARCHITECTURES: dict[str, Architecture] = {
    "Llama": _causal("Llama"),
    "Gemma 2": _causal("Gemma2", error=1e-6),
    "GPT-2": _of("GPT2LMHeadModel", "GPT2Config", more_flops=_LAST),
    "GPT-NeoX": _causal("GPTNeoX"),
    "Falcon": _causal("Falcon", head_dim=None, ffn_hidden_size=WIDE, more_flops=_LAST),
    "BLOOM": _causal("Bloom", more_flops=_LAST),
    "OLMo 2": _causal("Olmo2"),
    "GLM-4": _causal("Glm4"),
    "Cohere": _causal("Cohere"),
    "Granite": _causal("Granite"),
    "Mixtral": _causal("Mixtral"),
    "Qwen 3 MoE": _causal("Qwen3Moe"),
    "GPT-OSS": _causal("GptOss"),
    "DeepSeek V3": _causal("DeepseekV3", **_DEEPSEEK, error=1e-6, more_flops=_LAST),
    "Llama 4 (text)": _causal("Llama4", "Llama4TextConfig", more_flops=_LAST, **_LLAMA_4),
    "T5": _seq2seq("T5", decoder_start_token_id=0, more_flops=_LAST),
    "BART": _seq2seq("Bart", finds=False),
    "BERT": _masked("Bert"),
    "ViT": _vision("ViT"),
    "Qwen 3-VL": _seq2seq("Qwen3VL", base=_QWEN3_VL, inputs=_qwen3_vl_images),
    "Nemotron": _causal("Nemotron"),
    "OLMo": _causal("Olmo"),
    "Doge": _causal("Doge", more_flops="the residual is scaled after it, and saved for that"),
    "Gemma 3n": _causal("Gemma3n", "Gemma3nTextConfig", **_GEMMA_3N, error=1e-6, more_flops=_ALT_UP),
    "JetMoE": _causal("JetMoe", kv_channels=8),
    "MiniMax": _causal("MiniMax", block_size=16, layer_types=_IN_TURN, error=1e-6),
    "Mamba": _causal("Mamba", finds=False),
    "RWKV": _causal("Rwkv", finds=False),
    "Jamba": _causal("Jamba", **_JAMBA, error=1e-6),
    "Zamba 2": _causal("Zamba2", more_flops="the Mamba layer after it reads it", **_ZAMBA_2),
    "Falcon H1": _causal("FalconH1", more_flops=_LAST, mamba_d_ssm=64),
    "Qwen 3-Next": _causal("Qwen3Next", layer_types=_IN_TURN, error=1e-6),
    "Granite 4 (hybrid)": _causal("GraniteMoeHybrid", **_GRANITE_4, error=1e-6, more_flops=_BEFORE_EXPERTS),
    "LFM 2": _causal("Lfm2", block_ff_dim=WIDE, layer_types=["conv", "full_attention"]),
    "ModernBERT": _masked("ModernBert", local_attention=16),
    "DistilBERT": _masked("DistilBert", more_flops=_POST_NORM),
    "MobileBERT": _masked("MobileBert", more_flops="the next MLP of the block reads it", **_MOBILE_BERT),
    "FNet": _masked("FNet"),
    "ALBERT": _masked("Albert", more_flops=_POST_NORM, embedding_size=16),
    "Longformer": _masked("Longformer", attention_window=[16, 16], max_position_embeddings=LENGTH + 2),
    "ESM": _masked("Esm", more_flops=_LAST, mask_token_id=2, position_embedding_type="rotary"),
    "DeBERTa V2": _masked("DebertaV2", finds=False, **_DEBERTA),
    "BEiT": _vision("Beit", more_flops=_LAYER_SCALE, layer_scale_init_value=0.1),
    "DINOv2 with registers": _vision("Dinov2WithRegisters", mlp_ratio=6, use_swiglu_ffn=True),
    "Swin": _vision("Swin", base=_SWIN),
    "LeViT": _vision("Levit", finds=False, **_LEVIT),
    "wav2vec 2.0": _of("Wav2Vec2ForSequenceClassification", **_WAV2VEC2, inputs=_SOUND, more_flops=_POST_NORM),
    "LLaVA": _seq2seq("Llava", base=_LLAVA, inputs=_images_in_text),
    "Llama 3.2 (image and text)": _seq2seq("Mllama", base=_MLLAMA, inputs=_images_beside_text, more_flops=_GATE),
}
