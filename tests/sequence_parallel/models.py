"""Models and inputs whose sequences ranks share, each with a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import tiled_linear_cross_entropy
from tests.models import WIDE, GatedMLP, H

VOCAB = 64


class Attention(nn.Module):
    """Causal attention with any numbers of heads, as hand-written models have it."""

    def __init__(self, heads: int = 4, keys: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.keys, self.width = heads, keys, width
        self.qkv = nn.Linear(H, (heads + 2 * keys) * width, bias=False)
        self.out = nn.Linear(heads * width, H, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for t in self.qkv(x).split([n * self.width for n in (self.heads, self.keys, self.keys)], -1)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.keys
        )
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A hand-written transformer block."""

    def __init__(self, **heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.attention, self.mlp = Attention(**heads), GatedMLP(H, WIDE)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A hand-written GPT with learned positions: logits, or with labels the loss."""

    def __init__(self, blocks: int = 2, **heads: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, H), nn.Embedding(256, H)
        self.blocks = nn.ModuleList(Block(**heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, window: int | None = None) -> Any:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        mask = None
        if window is not None:
            places = torch.arange(x.shape[1], device=x.device)
            distance = places[:, None] - places
            mask = (distance >= 0) & (distance < window)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Body(nn.Module):
    """From embedded tokens to normalized hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class WithBody(nn.Module):
    """A model with a module that a policy can name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, H), nn.Embedding(256, H)
        self.body, self.head = Body(), nn.Linear(H, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        return tiled_linear_cross_entropy(self.body(x), self.head.weight, labels, shift=True)


class HeadsBlock(nn.Module):
    """Causal attention alone, with a projection for each of queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    attention: Any = None
    """Attention of queries, keys, values and a mask, in place of causal attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        causal = F.scaled_dot_product_attention
        out = causal(q, k, v, is_causal=True) if mask is None else self.attention(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class HeadsOnly(nn.Module):
    """Two blocks of attention alone."""

    def __init__(self, hidden: int, heads: int, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HeadsBlock(hidden, heads) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pooled(nn.Module):
    """Blocks in any order, and a loss of the mean over tokens, which any number of tokens has."""

    def __init__(self, order: list[int], block: Callable[[], nn.Module] = Block, width: int = H) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.order = nn.Embedding(VOCAB, width), order
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index in self.order:
            x = self.blocks[index](x)
        return x.mean(1).square().sum()


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids ``[rows, tokens]``."""
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A model, and the inputs of a step."""

    build: Callable[[], nn.Module]
    tokens: int = 37
    rows: int = 2
    given: Callable[[Tensor], dict[str, Any]] = field(default=lambda x: {"input_ids": x, "labels": x})
    targets: str = "auto"
    error: float = 1e-12
    """Relative; more where a model rounds to float32 whatever its weights are."""

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        return self.given(ids(self.rows, self.tokens, seed))


def causal(name: str, **fields: Any) -> Callable[[], nn.Module]:
    """Return what builds a small causal model of transformers in float64."""

    def build() -> nn.Module:
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "head_dim": 8, "pad_token_id": 0}
        loading = {"experts_implementation": "eager"} if "num_local_experts" in fields else {}
        config = transformers.AutoConfig.for_model(name, **{**sizes, **fields})
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **loading).double()

    return build


def gpt(**heads: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(**heads).double()

    return build


def body() -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return WithBody().double()

    return build


def packed(x: Tensor) -> dict[str, Any]:
    lengths = [x.shape[1] // 3, x.shape[1] // 2, x.shape[1] - x.shape[1] // 3 - x.shape[1] // 2]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(len(x), -1)
    return {"input_ids": x, "labels": x, "position_ids": positions, "use_cache": False}


def padded(left: bool) -> Callable[[Tensor], dict[str, Any]]:
    def given(x: Tensor) -> dict[str, Any]:
        mask = torch.ones_like(x)
        for row in range(len(x)):
            count = 3 + 2 * row
            mask[row, :count] = 0 if left else 1
            mask[row, -count:] = 1 if left else 0
        return {"input_ids": x * mask, "labels": x.where(mask.bool(), -100), "attention_mask": mask}

    return given


def half_ignored(x: Tensor) -> dict[str, Any]:
    """Labels that belong to one rank alone."""
    labels = x.clone()
    labels[:, : -x.shape[1] // 6] = -100
    return {"input_ids": x, "labels": labels}


def no_labels(x: Tensor) -> dict[str, Any]:
    return {"input_ids": x, "use_cache": False}


_WINDOW = {"sliding_window": 6}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES = {
    "llama": Case(causal("llama")),
    "llama 8/2": Case(causal("llama", num_attention_heads=8, head_dim=4)),
    "llama 8/1": Case(causal("llama", num_attention_heads=8, num_key_value_heads=1, head_dim=4)),
    "llama 6/3": Case(causal("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)),
    "llama 7/7": Case(causal("llama", hidden_size=56, num_attention_heads=7, num_key_value_heads=7)),
    "llama 10/5": Case(causal("llama", hidden_size=80, num_attention_heads=10, num_key_value_heads=5)),
    "llama 8/8": Case(causal("llama", num_attention_heads=8, num_key_value_heads=8, head_dim=4)),
    "fewer tokens than ranks": Case(causal("llama"), tokens=3),
    "as many tokens as ranks": Case(causal("llama"), tokens=4),
    "labels on one rank": Case(causal("llama"), given=half_ignored),
    "packed": Case(causal("llama"), rows=1, given=packed),
    "packed rows": Case(causal("llama"), rows=2, given=packed),
    "padded left": Case(causal("llama"), given=padded(True)),
    "padded right": Case(causal("llama"), given=padded(False)),
    "no labels": Case(causal("llama"), given=no_labels),
    "sliding window": Case(causal("mistral", **_WINDOW)),
    "sliding window, packed": Case(causal("mistral", **_WINDOW), rows=1, given=packed),
    "gemma 3": Case(causal("gemma3_text", **_WINDOW, **_MIXED), error=3e-7),
    "qwen 3": Case(causal("qwen3")),
    "qwen 3, packed": Case(causal("qwen3"), rows=1, given=packed),
    "gpt-2": Case(causal("gpt2", **_NO_DROPOUT)),
    "mixtral": Case(causal("mixtral", num_local_experts=4, num_experts_per_tok=2)),
    "hand-written": Case(gpt()),
    "hand-written 6/3": Case(gpt(heads=6, keys=3)),
    "named module": Case(body(), given=half_ignored, targets="body"),
    "hand-written, window": Case(gpt(), given=lambda x: {"input_ids": x, "labels": x, "window": 5}),
}
