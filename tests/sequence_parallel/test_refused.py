"""Where ranks that share a sequence would compute something else, all of them raise one sentence with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_tiled
from lt_tiled import SequenceParallel
from tests.models import AttachedLoss
from tests.sequence_parallel.cases import DYNAMIC, LONGROPE, SWITCH, Case, ids_alone, labeled, llama, no_labels
from tests.sequence_parallel.hybrids import causal
from tests.sequence_parallel.models import GPT, Between, Coded, OwnAttention, Pooled, hand_written, ids
from tests.sequence_parallel.runs import shared
from tests.world import World

# Blocks that mix tokens outside of attention, or compute with the number or the place of their own


def averaged(block: Coded, x: Tensor) -> Tensor:
    """Add a little of the mean over tokens."""
    x = block.plain(x)
    return x + 0.01 * x.mean(1, keepdim=True)


def normalized(block: Coded, x: Tensor) -> Tensor:
    """Divide by a deviation over all tokens in training, as a batch norm."""
    x = block.plain(x)
    return x / x.std((0, 1)) if block.training else x


def balance(x: Tensor) -> Tensor:
    """Return a small loss that is no mean over tokens."""
    return 1e-3 * x.softmax(-1).mean((0, 1)).square().sum()


def attaches_a_loss(block: Coded, x: Tensor) -> Tensor:
    x = block.plain(x)
    return AttachedLoss.apply(x, balance(x))


def keeps_a_loss(block: Coded, x: Tensor) -> Tensor:
    """Leave a loss in an attribute, for the code around the model."""
    x = block.plain(x)
    block.loss = balance(x)
    return x


class ClippedBack(torch.autograd.Function):
    """Clips the gradient of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def clipped(block: Coded, x: Tensor) -> Tensor:
    return block.plain(ClippedBack.apply(x))


def locally_masked(block: Coded, x: Tensor) -> Tensor:
    """Make a mask for the tokens that are given."""
    return block.plain(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())


class Positioned(Pooled):
    """Its blocks read the positions of all tokens from an attribute."""

    def forward(self, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            block.where = torch.arange(input_ids.shape[1])[:, None] / 10
        return super().forward(input_ids)


def positioned() -> nn.Module:
    return hand_written(Positioned, block=lambda: Coded(lambda block, x: block.plain(x + block.where)))()


class Recomputed(Pooled):
    """Has reentrant activation checkpointing of its own, which forgets that ranks share the sequence."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.mean(1).square().sum()


def own_checkpointing() -> nn.Module:
    model: Any = causal("llama")()
    model.gradient_checkpointing_enable()
    return model.train()


def kernel_of_a_layer() -> nn.Module:
    """A layer with a state is replaced as a whole, so that none of its functions is called."""
    model: Any = causal("qwen3_next")()
    layer = model.model.layers[0].linear_attn
    layer.forward = MethodType(lambda self, hidden_states, **_: hidden_states.cumsum(1), layer)
    return model


def pooled(code: Callable[[Coded, Tensor], Tensor]) -> Case:
    return Case(hand_written(Pooled, block=lambda: Coded(code)), ids_alone)


_MIXES = "has another (output|gradient of its input) when 2 ranks share the sequence.* Use sdpa"
_UNSEEN = "shared its sequences, and no attention saw all tokens: use attention of transformers"
_NOT_CLOSED = "the last of the blocks was not called after it.*name one module around them"
_FEW_STATES = {"linear_num_value_heads": 1, "linear_num_key_heads": 1}
REFUSED: dict[str, tuple[Case, str]] = {
    # What the self-check sees.
    "mean over tokens": (pooled(averaged), _MIXES),
    "norm in training": (pooled(normalized), _MIXES),
    "backward pass": (pooled(clipped), _MIXES),
    "loss that is attached": (pooled(attaches_a_loss), "has another loss attached"),
    "loss in an attribute": (pooled(keeps_a_loss), "has another loss in an attribute"),
    "attribute": (Case(positioned, ids_alone), "Pass blocks what they read as arguments"),
    "kernel of a layer": (Case(kernel_of_a_layer), _MIXES),
    "mean between blocks": (Case(hand_written(Between, "center"), ids_alone), "when 2 ranks share the sequence"),
    "loss of each block": (Case(hand_written(Between, "loss"), ids_alone), "when 2 ranks share the sequence"),
    # What is refused where it is called.
    "early exit": (Case(hand_written(Pooled, (0, 1)), ids_alone), _NOT_CLOSED),
    "reversed blocks": (Case(hand_written(Pooled, (2, 1, 0)), ids_alone), _NOT_CLOSED),
    "reentrant checkpoints": (Case(hand_written(Recomputed), ids_alone), "of its own.*Use lt_tiled's"),
    "gradient_checkpointing_enable": (Case(own_checkpointing), "in place of gradient_checkpointing_enable"),
    "mask of a rank": (pooled(locally_masked), "which is not that of all 37 tokens. Make masks before the first block"),
    "fewer tokens": (
        pooled(lambda block, x: block.plain(x)[:, 1:]),
        "returns hidden states .* and nothing else: return",
    ),
    "attention that is not shared": (Case(hand_written(OwnAttention, False)), _UNSEEN),
    "output_attentions": (
        Case(causal("llama"), lambda x: labeled(x) | {"output_attentions": True}),
        "output_attentions.*set it to False",
    ),
    "too few heads": (Case(llama(1, 1)), "=2 needs as many query heads .* LlamaForCausalLM has 1: use .*=1 or less"),
    "too few heads of a state": (Case(causal("qwen3_next", **_FEW_STATES)), "has 1: use sequence_parallel=1"),
}
"""A model, and what all ranks say."""


def said(name: str) -> str:
    return shared(REFUSED[name][0])[2]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, world: World) -> None:
    """A model whose tokens cannot be shared raises before a weight gets a gradient, on all ranks alike."""
    for message in world(said, name):
        assert re.search(REFUSED[name][1], message)


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


def after_an_error(targets: str) -> tuple[float, float]:
    """What a block counts in a buffer in one call, and the error of a shorter call behind one that failed."""
    model, x = GPT(), ids(2, 36)
    mlp = model.blocks[0].mlp
    mlp.register_buffer("calls", torch.zeros(()))
    act = mlp.act

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    def counts(x: Tensor) -> Tensor:
        mlp.calls += 1
        return act(x)

    with torch.no_grad():
        plain = model(x[:, 1:])
        mlp.act = counts
        with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(2, targets=targets)):
            model(x)
            mlp.act = fails
            with pytest.raises(ArithmeticError):
                model(x)
            mlp.act = act
            return float(mlp.calls), float((model(x[:, 1:]) - plain).abs().max())


@pytest.mark.parametrize("targets", ["auto", "blocks.0"])
def test_what_a_check_and_an_error_leave(targets: str, world: World) -> None:
    """The self-check leaves buffers as they were, and a call that fails no shared pass."""
    for calls, error in world(after_an_error, targets):
        assert calls == 1
        assert error < 1e-5
