"""Small modules and models that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import tiled_linear_cross_entropy

H, WIDE = 16, 48


class AttachedLoss(torch.autograd.Function):
    """Gives a loss a gradient of one, as DeepSeek's ``AddAuxiliaryLoss`` does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class GatedMLP(nn.Module):
    """The feed-forward part of Llama."""

    def __init__(
        self, hidden: int = H, wide: int = WIDE, act: Callable[[Tensor], Tensor] = F.silu, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, wide, bias=bias)
        self.up = nn.Linear(hidden, wide, bias=bias)
        self.down = nn.Linear(wide, hidden, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Coded(GatedMLP):
    """An MLP with other code: a function of the module and of what it is called with."""

    def __init__(self, code: Callable[..., Any], **fields: Any) -> None:
        super().__init__(**fields)
        self.code = code

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)

    def mlp(self, x: Tensor) -> Tensor:
        """The output of the MLP itself."""
        return GatedMLP.forward(self, x)


class PlainMLP(nn.Module):
    """The feed-forward part of GPT-2, with dropout at its end, and any output width."""

    def __init__(self, hidden: int = H, wide: int = WIDE, out: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, wide)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(wide, hidden if out is None else out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.act(self.fc1(x))))


class RoutedMLP(nn.Module):
    """A mixture of experts: returns the hidden states and the router's logits, flat (``[tokens, E]``) or not (``[B, S,
    E]``).
    """

    def __init__(self, experts: int = 4, flat: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(H, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(experts))
        self.flat = flat

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        weight, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            if len(row):
                out = out.index_add(0, row, expert(tokens[row]) * weight[row, slot, None])
        return out.view_as(x), logits if self.flat else logits.view(*x.shape[:-1], -1)


class PythonNorm(nn.Module):
    """A norm in several operations, as transformers writes it."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.weight, self.dim = nn.Parameter(torch.rand(H)), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + 1e-6)


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual."""

    def __init__(self, hidden: int = H, wide: int = WIDE, mlp: Callable[[int, int], nn.Module] = GatedMLP) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = mlp(hidden, wide)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    """A language model of such blocks over 32 tokens; called with ids it returns logits, with labels too its loss, in
    tiles.
    """

    def __init__(self, blocks: int = 2, hidden: int = H, wide: int = WIDE) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, hidden)
        self.blocks = nn.ModuleList(Block(hidden, wide) for _ in range(blocks))
        self.head = nn.Linear(hidden, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if labels is None:
            return self.head(x)
        return tiled_linear_cross_entropy(x, self.head.weight, labels, num_shards=3, shift=True)


def lm_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model: nn.Module, ids: Tensor, tiled: bool) -> Tensor:
    """The loss of a ``TinyLM``, from its logits or in tiles."""
    return model(ids, ids) if tiled else lm_loss(model(ids), ids)


def tiny_llama(**fields: Any) -> Any:
    """A Hugging Face Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **fields}))


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a model of transformers in training mode, in which nothing is dropped."""
    for module in model.train().modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    return model
