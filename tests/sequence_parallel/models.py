"""Small hand-written models whose sequences ranks share, and attention functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as from_torch
from torch.utils.checkpoint import checkpoint

from lt_tiled import shared_attention, tiled_linear_cross_entropy
from tests.models import WIDE, GatedMLP, H

VOCAB = 64


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids ``[rows, tokens]``."""
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """Causal attention with any numbers of heads, as hand-written models have it."""

    function: Any = None
    """Instead of torch's."""

    def __init__(self, heads: int = 4, keys: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.keys, self.width = heads, keys, width
        self.qkv = nn.Linear(H, (heads + 2 * keys) * width, bias=False)
        self.out = nn.Linear(heads * width, H, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).split([n * self.width for n in (self.heads, self.keys, self.keys)], -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        grouped = self.heads != self.keys
        function = self.function or F.scaled_dot_product_attention
        out = function(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
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


class Coded(Block):
    """A block with other code: a function of the block and its input."""

    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.code(self, x)

    def plain(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output of the block itself."""
        return Block.forward(self, x, mask)


class GPT(nn.Module):
    """A hand-written GPT with learned positions: logits, or with labels the loss."""

    def __init__(self, blocks: int = 2, **heads: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, H), nn.Embedding(256, H)
        self.blocks = nn.ModuleList(Block(**heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, window: Any = None) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.positions(places)
        distance = places[:, None] - places
        mask = None if window is None else (distance >= 0) & (distance < window)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Causal attention in matrix products, with keys and values for each query head."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return (query @ key.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ value


def varlen_like(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with the arguments of flash attention: a mask ``[B, S]`` of padding, and documents in position ids."""
    tokens = key.shape[2]
    assert attention_mask is None or attention_mask.shape[1] == tokens
    assert position_ids is None or position_ids.shape[-1] == tokens
    place = torch.arange(tokens)
    distance = place[:, None] - place
    seen = distance >= 0
    if sliding_window is not None:
        seen = seen & (distance < sliding_window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None].bool()
    elif position_ids is not None:
        document = (position_ids == 0).cumsum(-1)
        seen = seen & (document[:, None, :, None] == document[:, None, None])
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen = seen | (distance == 0)  # padding attends to itself, so that nothing is nan
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    return out.transpose(1, 2), None


class OwnAttention(GPT):
    """A GPT with an attention function of its own, which is shared or not."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.function = shared_attention(softmax_attention) if shared else softmax_attention
        if shared:  # one that calls another one which is shared
            self.blocks[1].attention.function = shared_attention(
                lambda *args, **options: F.scaled_dot_product_attention(*args, **options)
            )


class Imported(GPT):
    """A GPT with torch's attention by a name of its own in every other block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].attention.function = lambda *args, **options: from_torch(*args, **options)


class WithBody(nn.Module):
    """A model with a module that a policy can name, dropout in front of it and a loss behind it."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.dropout, self.body = (
            nn.Embedding(VOCAB, H),
            nn.Dropout(dropout),
            nn.Sequential(Block(), Block()),
        )
        self.body.append(nn.LayerNorm(H))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.embed(input_ids))
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return tiled_linear_cross_entropy(x, self.embed.weight, labels, shift=True)


class Pooled(nn.Module):
    """Blocks in any order, and a loss of the mean over tokens, which any number of tokens has."""

    def __init__(self, order: Sequence[int] = (0, 1, 2), block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.order = nn.Embedding(VOCAB, H), order
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index in self.order:
            x = self.blocks[index](x)
        return x.mean(1).square().sum()


class Between(nn.Module):
    """Does something with the hidden states between the blocks, which are in a ``ModuleDict`` as those of nanoGPT."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.embed, self.change = nn.Embedding(VOCAB, H), change
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(3))})

    def forward(self, input_ids: Tensor) -> Tensor:
        x, kept = self.embed(input_ids), torch.zeros(())
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
            if self.change == "scale":
                x = 2 * x
            elif self.change == "center":
                x = x - x.mean(1, keepdim=True)
            else:
                kept = kept + x.square().mean()
        return x.mean(1).square().sum() + kept


def hand_written(kind: Callable[..., nn.Module], *args: Any, **fields: Any) -> Callable[[], nn.Module]:
    """Return what builds a hand-written model in float64."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind(*args, **fields).double()

    return build
