"""Models and inputs that ranks share as one process computes them: one row for each kind of model, layer and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import H
from tests.sequence_parallel.hybrids import HYBRIDS, causal
from tests.sequence_parallel.models import (
    GPT,
    VOCAB,
    Between,
    Imported,
    OwnAttention,
    Pooled,
    WithBody,
    hand_written,
    ids,
    varlen_like,
)

# What a model is given


def labeled(x: Tensor) -> dict[str, Any]:
    return {"input_ids": x, "labels": x}


def no_labels(x: Tensor) -> dict[str, Any]:
    return {"input_ids": x, "use_cache": False}


def ids_alone(x: Tensor) -> dict[str, Any]:
    return {"input_ids": x}


def packed(x: Tensor) -> dict[str, Any]:
    """Three documents in each row."""
    lengths = [x.shape[1] // 3, x.shape[1] // 2, x.shape[1] - x.shape[1] // 3 - x.shape[1] // 2]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(len(x), -1)
    return {"input_ids": x, "labels": x, "position_ids": positions, "use_cache": False}


def packed_apart(x: Tensor) -> dict[str, Any]:
    """Three documents in the first row, and one in the others."""
    given = packed(x)
    ones = torch.arange(x.shape[1]).expand(len(x) - 1, -1)
    return given | {"position_ids": torch.cat([given["position_ids"][:1], ones])}


def padded(left: bool, **more: Any) -> Callable[[Tensor], dict[str, Any]]:
    """Return what pads each row by another number of tokens."""

    def given(x: Tensor) -> dict[str, Any]:
        mask = torch.ones_like(x)
        for row in range(len(x)):
            count = 3 + 2 * row
            mask[row, :count] = 0 if left else 1
            mask[row, -count:] = 1 if left else 0
        return {"input_ids": x * mask, "labels": x.where(mask.bool(), -100), "attention_mask": mask} | more

    return given


def half_ignored(x: Tensor) -> dict[str, Any]:
    """Labels that belong to one rank alone."""
    return {"input_ids": x, "labels": x.where(torch.arange(x.shape[1]) >= x.shape[1] * 5 // 6, -100)}


@dataclass(frozen=True)
class Case:
    """A model, and the inputs of its steps."""

    build: Callable[[], nn.Module]
    given: Callable[[Tensor], dict[str, Any]] = labeled
    lengths: tuple[int, ...] = (37,)
    """Of the sequences of each step."""
    rows: int = 2
    targets: str = "auto"

    def inputs(self, seed: int = 0) -> list[dict[str, Any]]:
        return [self.given(ids(self.rows, tokens, seed)) for tokens in self.lengths]


# Models that need more than a configuration


def with_flash(name: str, **fields: Any) -> Callable[[], nn.Module]:
    """Return what builds a model with the arguments of flash attention, whose package is not installed."""

    def build() -> nn.Module:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

        TABLE["flash_attention_2"] = varlen_like
        model: Any = causal(name, **fields)()
        model.config._attn_implementation = "flash_attention_2"
        return model

    return build


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model, adapter = causal("llama")(), LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    return get_peft_model(model, adapter).double()


def mean_of_own(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
    """A user's loss, which divides by the labels that it is given."""
    targets = F.pad(labels[..., 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_own_loss() -> nn.Module:
    model: Any = causal("llama")()
    model.loss_function = mean_of_own
    return model


def encoder() -> nn.Module:
    """Blocks of torch."""
    layers = [nn.TransformerEncoderLayer(H, 4, 16, batch_first=True, dropout=0.0) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCAB, H), nn.Sequential(*layers)).double()


SWITCH = 24
"""The number of tokens above which rotary tables are others."""
AROUND_SWITCH = (SWITCH - 5, SWITCH + 13, SWITCH - 5, SWITCH + 1)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a configuration whose rotary tables depend on the length."""
    longest = {"max_position_embeddings": SWITCH if kind == "dynamic" else 4 * SWITCH}
    return longest | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | fields}


DYNAMIC = rope("dynamic", factor=4.0)
_ORIGINAL = {"original_max_position_embeddings": SWITCH}
LONGROPE = rope("longrope", short_factor=[1.0] * 4, long_factor=[1.5, 2.0, 3.0, 4.0], **_ORIGINAL)
LONGROPE |= {**_ORIGINAL, "bos_token_id": 1, "eos_token_id": 1}
WINDOW = {"sliding_window": 6}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], **WINDOW}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e3}
_EACH_KIND = {"full_attention": DYNAMIC["rope_parameters"], "sliding_attention": _DEFAULT}
EACH_KIND = _MIXED | {"max_position_embeddings": SWITCH, "rope_parameters": _EACH_KIND}
_BALANCED = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_BALANCED |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_OPT = {"word_embed_proj_dim": 32, "ffn_dim": 96}
_BART = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
UNCACHED = {"use_cache": False}


def llama(heads: int, keys: int, width: int = 8) -> Callable[[], nn.Module]:
    fields = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": width}
    return causal("llama", hidden_size=heads * width, **fields)


CASES = {
    # Causal models of transformers, from their ids to their loss: heads, tokens, labels and masks.
    "llama": Case(causal("llama")),
    "one key head": Case(llama(8, 1, 4)),
    "7 heads": Case(llama(7, 7)),
    "fewer tokens than ranks": Case(causal("llama"), lengths=(3,)),
    "labels on one rank": Case(causal("llama"), half_ignored),
    "other ignore_index": Case(causal("llama"), lambda x: labeled(x) | {"ignore_index": 3}),
    "shifted labels": Case(causal("llama"), lambda x: labeled(x) | {"shift_labels": x.roll(-1, 1)}),
    "labels that are the ids": Case(causal("llama"), lambda x: labeled(x) | {"shift_labels": x}),
    "packed": Case(causal("llama"), packed, rows=1),
    "packed apart": Case(causal("llama"), packed_apart),
    "padded left": Case(causal("llama"), padded(True)),
    "padded right": Case(causal("llama"), padded(False)),
    "as many tokens as a head has channels": Case(causal("llama"), lengths=(8,)),
    "as many tokens as channels and rows": Case(causal("llama"), packed_apart, lengths=(8,), rows=8),
    "window, packed": Case(causal("mistral", **WINDOW), packed, rows=1),
    "windows in some layers": Case(causal("gemma3_text", **_MIXED)),
    "flash, packed": Case(with_flash("mistral", **WINDOW), packed, rows=1),
    "flash, padded left": Case(with_flash("llama"), padded(True)),
    "LoRA": Case(with_lora),
    "loss of the user's": Case(with_own_loss, half_ignored),
    "router loss": Case(causal("mixtral", **_BALANCED), padded(True)),
    # Rotary tables, on both sides of the length above which they are others, and back.
    "rope, dynamic": Case(causal("llama", **DYNAMIC), lengths=AROUND_SWITCH),
    "rope, longrope": Case(causal("phi3", **LONGROPE), lengths=AROUND_SWITCH),
    "rope of each kind of layer": Case(causal("gemma3_text", **EACH_KIND), lengths=AROUND_SWITCH),
    # Blocks of other models, and of causal ones whose hidden states are gathered behind the blocks.
    "no labels": Case(causal("llama"), no_labels),
    "cache by default": Case(causal("llama"), ids_alone),
    "positions from the mask": Case(causal("opt", **_OPT), padded(True, **UNCACHED)),
    "positions from ids": Case(causal("roberta", is_decoder=True), padded(False, **UNCACHED)),
    "positions from the length": Case(causal("bart", **_BART), padded(True, **UNCACHED)),
    "bias of each head": Case(causal("falcon", head_dim=None, alibi=True), padded(False)),
    "hand-written": Case(hand_written(GPT)),
    "hand-written, window": Case(
        hand_written(GPT), lambda x: labeled(x) | {"window": torch.arange(5, 9).view(4, 1, 1)}
    ),
    "hand-written, own attention": Case(hand_written(OwnAttention, True)),
    "nn.TransformerEncoderLayer": Case(encoder, lambda x: {"input": x}),
    "torch's attention by another name": Case(hand_written(Imported)),
    "named module": Case(hand_written(WithBody), half_ignored, (38, 19), targets="body"),
    "named module, checkpointed": Case(hand_written(WithBody, 0.0, True), half_ignored, targets="body"),
    "a block twice": Case(hand_written(Pooled, (0, 0, 1, 1, 2)), ids_alone),
    "code between blocks": Case(hand_written(Between, "scale"), ids_alone),
    # Layers with a state, convolutions, and eager attention with sinks.
    **{name: Case(causal(name)) for name in HYBRIDS},
    "qwen3_next, uneven": Case(causal("qwen3_next", linear_num_value_heads=6, linear_num_key_heads=3)),
    "qwen3_next, no labels": Case(causal("qwen3_next"), no_labels),
    "qwen3_next, padded": Case(causal("qwen3_next"), padded(True)),
    "bamba, one group": Case(causal("bamba", mamba_n_groups=1), lengths=(38,)),
    "bamba, padded": Case(causal("bamba"), padded(True)),
    "nemotron_h, padded right": Case(causal("nemotron_h"), padded(False)),
    "mamba2, padded": Case(causal("mamba2"), padded(True, labels=None, **UNCACHED)),
    "lfm2, padded": Case(causal("lfm2"), padded(True)),
    "lfm2, few tokens": Case(causal("lfm2", conv_L_cache=4), lengths=(5,)),
    "gpt_oss, padded": Case(causal("gpt_oss"), padded(True)),
}
