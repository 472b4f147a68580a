"""Small random instances of architectures from transformers, each with inputs that give a loss.

The first forty were there when 0.1.0 was written; the others were chosen to be as different from them, and from each
other, as transformers has them.
"""

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


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def _text(model: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


def _pixels(model: Any) -> torch.Tensor:
    return torch.randn(BATCH, 3, 64, 64, generator=torch.Generator().manual_seed(2)).to(model.dtype)


def _images(model: Any) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(model), "labels": torch.tensor([0, 1])}


def _speech(model: Any) -> dict[str, torch.Tensor]:
    sound = torch.randn(BATCH, 16, 2 * LENGTH, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    return {"input_features": sound, "labels": _ids()}


def _spectrum(model: Any) -> dict[str, torch.Tensor]:
    sound = torch.randn(BATCH, LENGTH, 16, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    return {"input_features": sound, "labels": torch.tensor([0, 1])}


def _waves(model: Any) -> dict[str, torch.Tensor]:
    sound = torch.randn(BATCH, 10 * LENGTH, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    return {"input_values": sound, "labels": torch.tensor([0, 1])}


def _images_and_titles(model: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": _pixels(model), "return_loss": True}


def _images_in_text(model: Any) -> dict[str, torch.Tensor]:
    ids = _ids()
    ids[:, 4:20] = model.config.image_token_id
    return {"input_ids": ids, "labels": _ids(), "pixel_values": _pixels(model)}


def _images_beside_text(model: Any) -> dict[str, torch.Tensor]:
    one = torch.ones(BATCH, 1, dtype=torch.int64)
    kinds = {"aspect_ratio_ids": one, "aspect_ratio_mask": one[..., None]}
    seen = torch.ones(BATCH, LENGTH, 1, 1, dtype=torch.int64)
    return {**_text(model), **kinds, "pixel_values": _pixels(model)[:, None, None], "cross_attention_mask": seen}


def _gemma3_images(model: Any) -> dict[str, torch.Tensor]:
    inputs = _images_in_text(model)
    kinds = (inputs["input_ids"] == model.config.image_token_id).long()
    return {**inputs, "token_type_ids": kinds, "attention_mask": torch.ones_like(kinds)}


def _qwen3_vl_images(model: Any) -> dict[str, torch.Tensor]:
    inputs = _images_in_text(model)
    patches = torch.randn(BATCH * 64, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    kinds = (inputs["input_ids"] == model.config.image_token_id).int()
    grid = torch.tensor([[1, 8, 8]] * BATCH)
    return {**inputs, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def _causal(
    name: str, mlp: str, path: str = "model.layers.*.mlp", error: float = 1e-7, more_flops: str = "", **fields: Any
) -> Architecture:
    fields, finds = {**_SIZES, **fields}, {path: mlp}
    return Architecture(f"{name}ForCausalLM", f"{name}Config", fields, finds, error=error, more_flops=more_flops)


def _masked(name: str, finds: dict[str, str], more_flops: str = "", **fields: Any) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", {**_SIZES, **fields}, finds, more_flops=more_flops)


def _vision(name: str, finds: dict[str, str], more_flops: str = "", **fields: Any) -> Architecture:
    kind = f"{name}ForImageClassification"
    return Architecture(kind, f"{name}Config", {**_VISION, **fields}, finds, _images, more_flops=more_flops)


_DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_DEEPSEEK |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK |= {"moe_intermediate_size": WIDE, "num_key_value_heads": HEADS}
_T5 = {"vocab_size": VOCAB, "d_model": H, "d_ff": WIDE, "d_kv": 8, "num_layers": 2, "num_heads": HEADS}
_T5 |= {"decoder_start_token_id": 0}
_STACKS = {"vocab_size": VOCAB, "d_model": H, "encoder_layers": 2, "decoder_layers": 2}
_STACKS |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
_STACKS |= {"encoder_ffn_dim": WIDE, "decoder_ffn_dim": WIDE}
_WHISPER = {**_STACKS, "num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": LENGTH}
_WHISPER |= {"pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
_BART = {**_STACKS, "max_position_embeddings": LENGTH}
_OPT = {"ffn_dim": WIDE, "word_embed_proj_dim": H}
_SEES = {"depth": 2, "hidden_size": H, "intermediate_size": WIDE, "num_heads": HEADS, "patch_size": 8}
_SEES |= {"out_hidden_size": H, "spatial_merge_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
_QWEN3_VL = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
_QWEN3_VL |= {"text_config": _SIZES, "vision_config": _SEES}
_GPT_NEO = {"vocab_size": VOCAB, "hidden_size": H, "num_layers": 2, "num_heads": HEADS, "intermediate_size": WIDE}
_GPT_NEO |= {"max_position_embeddings": LENGTH, "attention_types": [[["global", "local"], 1]], "window_size": 16}
_DISTILBERT = {"vocab_size": VOCAB, "dim": H, "hidden_dim": WIDE, "n_layers": 2, "n_heads": HEADS}
_DISTILBERT |= {"max_position_embeddings": LENGTH}
_MAMBA_2 = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_ZAMBA_2 = {"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 16}
_ZAMBA_2 |= {"num_mem_blocks": 1, "hybrid_layer_ids": [0, 1], "layers_block_type": ["hybrid", "hybrid"]}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA |= {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_expand": 1}
_QWEN3_NEXT = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_QWEN3_NEXT |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
_QWEN3_NEXT |= {"shared_expert_intermediate_size": WIDE}
_GEMMA_3N = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
_GEMMA_3N |= {"laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA_3N |= {"activation_sparsity_pattern": [0.9, 0.0]}
_LONGCAT = {"ffn_hidden_size": WIDE, "expert_ffn_hidden_size": WIDE, "moe_topk": 2, "zero_expert_num": 1}
_LONGCAT |= {"num_layers": 1}
_WAV2VEC2: dict[str, Any] = {"hidden_size": H, "intermediate_size": WIDE, "num_hidden_layers": 2}
_WAV2VEC2 |= {"num_attention_heads": HEADS, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (5, 2)}
_WAV2VEC2 |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
_WAV2VEC2 |= {"classifier_proj_size": 8, "apply_spec_augment": False, "layerdrop": 0.0}
_WAV2VEC2_BERT = {**_WAV2VEC2, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 7}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_LEVIT = {"image_size": 64, "hidden_sizes": [16, 16, 32], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1]}
_HIERA = {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "image_size": [64, 64], "num_query_pool": 1}
_FEW_PATCHES = {**_VISION, "patch_size": 16}
_CLIP = {"text_config": {**_SIZES, "eos_token_id": 2}, "vision_config": _FEW_PATCHES, "projection_dim": 16}
_LLAVA = {"text_config": {**_SIZES, "model_type": "llama"}, "image_token_id": 1}
_LLAVA |= {"vision_config": {**_FEW_PATCHES, "model_type": "clip_vision_model"}}
_MLLAMA = {"text_config": {**_SIZES, "cross_attention_layers": [1]}, "image_token_index": 1}
_CROSS = {"hidden_size": H, "intermediate_size": WIDE, "num_hidden_layers": 2, "num_global_layers": 1}
_CROSS |= {"attention_heads": HEADS, "image_size": 64, "patch_size": 8, "max_num_tiles": 1, "vision_output_dim": 2 * H}
_CROSS |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
_MLLAMA |= {"vision_config": _CROSS}
_LAST = "it does not end in an `nn.Linear`"
_POST_NORM = "the norm of the sum with the residual reads it"
_LAYER_SCALE = "the gradient of its scale, which is no module, reads it"

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
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config", _GPT2, {"transformer.h.*.mlp": "GPT2MLP"}, more_flops=_LAST),
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
        more_flops=_LAST,
    ),
    "BLOOM": _causal("Bloom", "BloomMLP", "transformer.h.*.mlp", more_flops=_LAST, n_head=HEADS, n_layer=2),
    "MPT": Architecture(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": H, "n_heads": 1, "n_layers": 2, "max_seq_len": LENGTH},
        {"transformer.blocks.*.ffn": "MptMLP"},
        more_flops=_LAST,
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
        more_flops=_LAST,
    ),
    "OLMoE": _causal("Olmoe", "OlmoeSparseMoeBlock", **_EXPERTS),
    "Granite MoE": _causal("GraniteMoe", "GraniteMoeMoE", "model.layers.*.block_sparse_moe", **_EXPERTS),
    "Llama 4 (text)": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_SIZES, **_EXPERTS, "intermediate_size_mlp": WIDE, "interleave_moe_layer_step": 2},
        {"model.layers.*.feed_forward": "Llama4TextMLP, Llama4TextMoe"},
        more_flops=_LAST,
    ),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        {f"{stack}.block.*.layer.*": "T5LayerFF" for stack in ("encoder", "decoder")},
        more_flops=_LAST,
    ),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", _BART, {}),
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
    "GPT-Neo": Architecture(  # its attention computes in float32
        "GPTNeoForCausalLM", "GPTNeoConfig", _GPT_NEO, {"transformer.h.*.mlp": "GPTNeoMLP"}, error=1e-6
    ),
    "StableLM, parallel": _causal("StableLm", "StableLmMLP", use_parallel_residual=True, qk_layernorm=True),
    "Nemotron": _causal("Nemotron", "NemotronMLP"),
    "OLMo": _causal("Olmo", "OlmoMLP"),
    "DiffLlama": _causal("DiffLlama", "DiffLlamaMLP"),
    "Doge": _causal("Doge", "DogeMLP", more_flops="the residual is scaled after it, and saved for that"),
    "Apertus": _causal("Apertus", "ApertusMLP"),
    "NanoChat": _causal("NanoChat", "NanoChatMLP"),
    "Gemma 3n": Architecture(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**_SIZES, **_GEMMA_3N},
        {"model.layers.*.mlp": "Gemma3nTextMLP", "model.layers.*.laurel": "Gemma3nTextLaurelBlock"},
        error=1e-6,
        more_flops="AltUp and the per-layer inputs read it",
    ),
    "PhiMoE": _causal(
        "Phimoe", "PhimoeSparseMoeBlock", **_EXPERTS, router_jitter_noise=0.0, input_jitter_noise=0.0, error=1e-6
    ),
    "JetMoE": _causal("JetMoe", "JetMoeMoE", **_EXPERTS, kv_channels=8),
    "LongCat-Flash": Architecture(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {**_SIZES, **_DEEPSEEK, **_LONGCAT},
        {"model.layers.*.mlp": "LongcatFlashMoE", "model.layers.*.mlps.*": "LongcatFlashMLP"},
        error=1e-6,
        more_flops="a second attention follows in the block",
    ),
    "MiniMax": _causal(
        "MiniMax",
        "MiniMaxSparseMoeBlock",
        **_EXPERTS,
        block_size=16,
        layer_types=["linear_attention", "full_attention"],
        error=1e-6,
    ),
    "Mamba": Architecture("MambaForCausalLM", "MambaConfig", _SIZES, {}),
    "RWKV": Architecture("RwkvForCausalLM", "RwkvConfig", _SIZES, {}),
    "Jamba": _causal(
        "Jamba", "JambaMLP, JambaSparseMoeBlock", "model.layers.*.feed_forward", **_EXPERTS, **_JAMBA, error=1e-6
    ),
    "Zamba 2": _causal(
        "Zamba2",
        "Zamba2MLP",
        "model.layers.*.shared_transformer.feed_forward",
        more_flops="the Mamba layer after it reads it",
        **_ZAMBA_2,
    ),
    "Falcon H1": _causal(
        "FalconH1", "FalconH1MLP", "model.layers.*.feed_forward", more_flops=_LAST, mamba_d_ssm=64, **_MAMBA_2
    ),
    "Qwen 3-Next": _causal("Qwen3Next", "Qwen3NextSparseMoeBlock", **_EXPERTS, **_QWEN3_NEXT, error=1e-6),
    "Granite 4 (hybrid)": Architecture(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**_SIZES, **_EXPERTS, **_MAMBA_2, "shared_intermediate_size": WIDE, "layer_types": ["mamba", "attention"]},
        {"model.layers.*.block_sparse_moe": "GraniteMoeHybridMoE", "model.layers.*.shared_mlp": "GraniteMoeHybridMLP"},
        error=1e-6,
        more_flops="the shared expert, which runs after the routed ones, is a module of its own",
    ),
    "LFM 2": _causal(
        "Lfm2",
        "Lfm2MLP",
        "model.layers.*.feed_forward",
        block_ff_dim=WIDE,
        layer_types=["conv", "full_attention"],
    ),
    "ModernBERT": _masked("ModernBert", {"model.layers.*.mlp": "ModernBertMLP"}, local_attention=16),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _DISTILBERT,
        {"distilbert.transformer.layer.*.ffn": "FFN"},
        more_flops=_POST_NORM,
    ),
    "MobileBERT": _masked(
        "MobileBert",
        {"mobilebert.encoder.layer.*.ffn.*": "FFNLayer"},
        "the next MLP of the block reads it",
        embedding_size=H,
        intra_bottleneck_size=16,
        num_feedforward_networks=2,
    ),
    "FNet": _masked("FNet", {"fnet.encoder.layer.*.feed_forward_chunk": "FNetLayer.feed_forward_chunk"}),
    "ALBERT": _masked(
        "Albert",
        {"albert.encoder.albert_layer_groups.*.albert_layers.*.ff_chunk": "AlbertLayer.ff_chunk"},
        _POST_NORM,
        embedding_size=16,
    ),
    "Longformer": _masked(
        "Longformer",
        {"longformer.encoder.layer.*.ff_chunk": "LongformerLayer.ff_chunk"},
        attention_window=[16, 16],
        max_position_embeddings=LENGTH + 2,
    ),
    "ESM": _masked(
        "Esm",
        {"esm.encoder.layer.*.feed_forward_chunk": "EsmLayer.feed_forward_chunk"},
        _LAST,
        mask_token_id=2,
        position_embedding_type="rotary",
    ),
    "NomicBERT": _masked("NomicBert", {"nomic_bert.layers.*.mlp": "NomicBertMLP"}, _POST_NORM),
    "DeBERTa V2": _masked("DebertaV2", {}, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    "BEiT": _vision("Beit", {"beit.layers.*.mlp": "BeitMLP"}, _LAYER_SCALE, layer_scale_init_value=0.1),
    "DINOv2 with registers": _vision(
        "Dinov2WithRegisters",
        {"dinov2_with_registers.encoder.layer.*.mlp": "Dinov2WithRegistersSwiGLUFFN"},
        mlp_ratio=6,
        use_swiglu_ffn=True,
    ),
    "Swin": _vision(
        "Swin",
        {"swin.encoder.layers.*.blocks.*.mlp": "SwinMLP"},
        **(_SWIN | {"depths": [2, 2]}),
        num_attention_heads=[2, 4],
    ),
    "Hiera": Architecture(
        "HieraForImageClassification",
        "HieraConfig",
        _HIERA,
        {"hiera.encoder.stages.*.layers.*.mlp": "HieraMlp"},
        _images,
    ),
    "LeViT": Architecture("LevitForImageClassification", "LevitConfig", {**_LEVIT, "key_dim": [8] * 3}, {}, _images),
    "wav2vec 2.0": Architecture(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        _WAV2VEC2,
        {"wav2vec2.encoder.layers.*.feed_forward": "Wav2Vec2FeedForward"},
        _waves,
        more_flops=_POST_NORM,
    ),
    "wav2vec 2.0-BERT": Architecture(
        "Wav2Vec2BertForSequenceClassification",
        "Wav2Vec2BertConfig",
        _WAV2VEC2_BERT,
        {f"wav2vec2_bert.encoder.layers.*.ffn{i}": "Wav2Vec2BertFeedForward" for i in (1, 2)},
        _spectrum,
        more_flops="the attention after the first MLP, and the last norm, read it",
    ),
    "CLIP": Architecture(
        "CLIPModel",
        "CLIPConfig",
        _CLIP,
        {f"{kind}_model.encoder.layers.*.mlp": "CLIPMLP" for kind in ("text", "vision")},
        _images_and_titles,
    ),
    "LLaVA": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        _LLAVA,
        {"model.vision_tower.encoder.layers.*.mlp": "CLIPMLP", "model.language_model.layers.*.mlp": "LlamaMLP"},
        _images_in_text,
    ),
    "Llama 3.2 (image and text)": Architecture(
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        _MLLAMA,
        {
            "model.vision_model.transformer.layers.*.mlp": "MllamaVisionMLP",
            "model.vision_model.global_transformer.layers.*.mlp": "MllamaVisionMLP",
            "model.language_model.layers.*.mlp": "MllamaTextMLP",
        },
        _images_beside_text,
        more_flops="the gate of a cross-attention layer reads it",
    ),
    "T5Gemma": Architecture(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {"encoder": _SIZES, "decoder": _SIZES, "vocab_size": VOCAB},
        {f"model.{stack}.layers.*.mlp": "T5GemmaMLP" for stack in ("encoder", "decoder")},
        error=1e-6,
    ),
}
