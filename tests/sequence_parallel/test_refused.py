"""Where ranks that share a sequence would compute something else, all of them raise one sentence with the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_tiled
from lt_tiled import SequenceParallel
from tests.models import H
from tests.sequence_parallel.cases import (
    DYNAMIC,
    LONGROPE,
    SWITCH,
    Case,
    ids_alone,
    labeled,
    llama,
    no_labels,
    that_exits,
)
from tests.sequence_parallel.hybrids import hybrid
from tests.sequence_parallel.models import (
    VOCAB,
    Between,
    Block,
    OwnAttention,
    Pooled,
    causal,
    hand_written,
    ids,
)
from tests.sequence_parallel.runs import shared
from tests.world import World

# Blocks that mix tokens outside of attention, or compute with the number or the place of their own


class Averaged(Block):
    """Adds a little of the mean over tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        return x + 0.01 * x.mean(1, keepdim=True)


class ShiftsALittle(nn.Module):
    """Has no attention, and adds a little of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + 3e-3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Normalized(Block):
    """Has a norm over all tokens in training, as a batch norm."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        return x / x.std((0, 1)) if self.training else x


class SomeTokens(Block):
    """A mixture of depths: in training half of the tokens go through the MLP, in evaluation those above a threshold."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x.sum(-1)
        chosen = scores > (scores.median(1, keepdim=True).values if self.training else 0)
        return super().forward(x, mask).where(chosen[..., None], x)


class Capacity(Block):
    """Its expert takes the first tokens that choose it in training, up to its capacity."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        chosen = x[..., :1] > x[..., 1:2]
        if self.training:
            chosen = chosen & (chosen.cumsum(1) <= 0.4 * x.shape[1])
        return super().forward(x, mask).where(chosen, x)


class ClippedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Clipped(Block):
    """Clips the gradient of all tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(ClippedBack.apply(x), mask)


class FailsOnFewTokens(Block):
    """Returns no numbers where it is given the tokens of one rank."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) / (x.shape[1] > 20)


class LogScaled(Block):
    """Scales its output by the logarithm of the length above 32 tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * max(1.0, math.log(x.shape[1], 32))


class LocalMask(Block):
    """Makes a mask for the tokens that it is given."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())


class ReadsPositions(Block):
    """Reads the positions of all tokens from an attribute."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + self.where, mask)


class Positioned(Pooled):
    def forward(self, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            block.where = torch.arange(input_ids.shape[1])[:, None] / 10
        return super().forward(input_ids)


class Recomputed(Pooled):
    """Has reentrant activation checkpointing of its own, which forgets that ranks share the sequence."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.mean(1).square().sum()


def multihead() -> nn.Module:
    """Blocks of torch, whose attention cannot be shared."""
    layers = [nn.TransformerEncoderLayer(H, 4, 16, batch_first=True, dropout=0.0) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCAB, H), nn.Sequential(*layers)).double()


def with_hook() -> nn.Module:
    """A hook counts from the end of the sequence, as that of PEFT's aLoRA."""

    def scale_the_last(block: nn.Module, args: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-5], 2 * x[:, -5:]], 1)

    model = hand_written(Pooled)()
    model.blocks[1].register_forward_hook(scale_the_last)  # type: ignore[index, union-attr]
    return model


def own_positions() -> nn.Module:
    """Attention counts positions from the tokens that it is given."""
    model: Any = causal("llama")()
    for layer in model.model.layers:
        attention = layer.self_attn

        def forward(hidden_states: Tensor, attention: Any = attention, **kwargs: Any) -> Any:
            scale = 1 + torch.arange(hidden_states.shape[1])[:, None].double() / 10
            return type(attention).forward(attention, hidden_states * scale, **kwargs)

        attention.forward = forward
    return model


def own_checkpointing() -> nn.Module:
    model: Any = causal("llama")()
    model.gradient_checkpointing_enable()
    return model.train()


def eager() -> nn.Module:
    model: Any = causal("llama")()
    model.set_attn_implementation("eager")
    return model


def kernel_of_a_layer() -> nn.Module:
    """A layer with a state is replaced as a whole, so that none of its functions is called."""
    model: Any = hybrid("qwen3_next")
    layer = model.model.layers[0].linear_attn
    layer.forward = MethodType(lambda self, hidden_states, **_: hidden_states.cumsum(1), layer)
    return model


def pooled(block: Callable[[], nn.Module]) -> Case:
    return Case(hand_written(Pooled, block=block), ids_alone)


def asking(option: str) -> Case:
    return Case(causal("llama"), lambda x: labeled(x) | {option: True})


_MIXES = "has another (output|gradient of its input) when 2 ranks share the sequence.* Use sdpa"
_NOT_CLOSED = "the last of the blocks was not called after it.*name one module around them"
_OTHER = "has another (output|gradient)|cannot run on those of one rank|needs self-attention"
_FEW_STATES = {"linear_num_value_heads": 1, "linear_num_key_heads": 1}
_INKLING = {"n_routed_experts": 8, "moe_intermediate_size": 32}
REFUSED: dict[str, tuple[Case, str]] = {
    # What the self-check sees.
    "mean over tokens": (pooled(Averaged), _MIXES),
    "shift": (pooled(ShiftsALittle), _MIXES),
    "norm in training": (pooled(Normalized), _MIXES),
    "mixture of depths": (pooled(SomeTokens), _MIXES),
    "capacity of experts": (pooled(Capacity), _MIXES),
    "hook that counts from the end": (Case(with_hook, ids_alone), _MIXES),
    "backward pass": (pooled(Clipped), _MIXES),
    "not finite": (pooled(FailsOnFewTokens), _MIXES),
    "scale of the length": (pooled(LogScaled), _MIXES),
    "positions of a rank": (Case(own_positions), _MIXES),
    "attribute": (Case(hand_written(Positioned, block=ReadsPositions), ids_alone), "Pass blocks what they read as arg"),
    "nn.TransformerEncoderLayer": (Case(multihead, lambda x: {"input": x}), _MIXES),
    "kernel of a layer": (Case(kernel_of_a_layer), _MIXES),
    "mean between blocks": (Case(hand_written(Between, "center"), ids_alone), "when 2 ranks share the sequence"),
    "shift between blocks": (Case(hand_written(Between, "shift"), ids_alone), "when 2 ranks share the sequence"),
    "loss of each block": (Case(hand_written(Between, "loss"), ids_alone), "when 2 ranks share the sequence"),
    "Mamba": (Case(partial(hybrid, "mamba"), lengths=(300,)), _OTHER),
    "MiniMax": (Case(partial(hybrid, "minimax"), lengths=(300,)), _OTHER),
    "DeepSeek V4": (Case(partial(hybrid, "deepseek_v4"), lengths=(300,)), _OTHER),
    "HY V4": (Case(partial(hybrid, "hy_v4"), lengths=(300,)), _OTHER),
    "position bias": (Case(partial(hybrid, "inkling_text", **_INKLING), no_labels), _OTHER),
    # What is refused where it is called.
    "early exit": (Case(hand_written(Pooled, (0, 1)), ids_alone), _NOT_CLOSED),
    "early exit without labels": (Case(that_exits, no_labels), _NOT_CLOSED),
    "reversed blocks": (Case(hand_written(Pooled, (2, 1, 0)), ids_alone), _NOT_CLOSED),
    "first block twice": (Case(hand_written(Pooled, (0, 0, 1, 2)), ids_alone, (38,)), "called again before the last"),
    "reentrant checkpoints": (Case(hand_written(Recomputed), ids_alone), "of its own.*Use lt_tiled's"),
    "gradient_checkpointing_enable": (Case(own_checkpointing), "in place of gradient_checkpointing_enable"),
    "mask of a rank": (pooled(LocalMask), "which is not that of all 37 tokens. Make masks before the first block"),
    "attention that is not shared": (Case(hand_written(OwnAttention, False)), "no attention saw|has another"),
    "eager attention": (Case(eager), "Use (the )?sdpa, flash or flex attention"),
    "output_attentions": (asking("output_attentions"), "output_attentions.*set it to False"),
    "output_hidden_states": (asking("output_hidden_states"), "output_hidden_states.*set it to False"),
    "too few heads": (Case(llama(1, 1)), "=2 needs as many query heads .* LlamaForCausalLM has 1: use .*=1 or less"),
    "too few heads of a state": (Case(partial(hybrid, "qwen3_next", **_FEW_STATES)), "has 1: use sequence_parallel=1"),
}
"""A model, and what all ranks say."""


def said(name: str) -> str:
    return shared(REFUSED[name][0])[2]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, world: World) -> None:
    """A model whose tokens cannot be shared raises before a weight gets a gradient, on all ranks alike."""
    for message in world(said, name):
        assert re.search(REFUSED[name][1], message)


class Exits(Pooled):
    """Returns the hidden states of an early block in evaluation."""

    def forward(self, input_ids: Tensor) -> Tensor:
        self.order = (0, 1, 2) if self.training else (0, 1)
        return super().forward(input_ids)


def exits_early() -> str:
    policy = SequenceParallel(2, self_check=False)  # which runs the model in evaluation, and refuses it at once
    with lt_tiled.prepare(model := Exits(), sequence_parallel=policy), torch.no_grad():
        model(ids(2, 37))
        with pytest.raises(ValueError, match="the last of the blocks") as refused:
            model.eval()(ids(2, 37))
        with pytest.raises(IndexError):
            model.train()(ids(2, 37) + VOCAB)
        model(ids(2, 37))
    return str(refused.value)


def test_early_exit_in_evaluation(world: World) -> None:
    """A call that is refused, or that fails, leaves no shared pass open: the next one trains on."""
    for message in world(exits_early):
        assert re.search(_NOT_CLOSED, message)


LONGER = {"mistral": {"sliding_window": SWITCH}, "llama": DYNAMIC, "phi3": LONGROPE}
"""Configurations that name a number of tokens."""


def refused_above(name: str, labels: bool) -> list[bool]:
    """Whether calls of more and more tokens are refused, where layers compute something else above that number."""
    model: Any = causal(name, **LONGER[name])()
    for layer in model.model.layers:
        run = layer.mlp.forward
        layer.mlp.forward = lambda x, run=run: run(x) * (2 if x.shape[1] > SWITCH else 1)
    found = []
    with lt_tiled.prepare(model, sequence_parallel=2):
        for tokens in (SWITCH - 4, SWITCH, SWITCH + 8):
            try:
                model(**(labeled if labels else no_labels)(ids(2, tokens)))
                found.append(False)
            except ValueError as error:
                found.append("when 2 ranks share the sequence" in str(error))
    return found


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("name", LONGER)
def test_longer_than_the_configuration_names(name: str, labels: bool, world: World) -> None:
    """The self-check runs again as soon as a batch is longer than a window or an original length of positions."""
    assert world(refused_above, name, labels) == [[False, False, True]] * 2


class CountsCalls(Block):
    """Counts its calls in a buffer, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x, mask) * self.calls


def counted() -> float:
    with lt_tiled.prepare(model := Pooled(block=CountsCalls), sequence_parallel=2):
        model(ids(2, 37))
    return float(model.blocks[1].calls)


def test_the_self_check_leaves_buffers(world: World) -> None:
    """A buffer that a block changes in place counts the calls of the step, and not those of the self-check."""
    assert world(counted) == [1, 1]
