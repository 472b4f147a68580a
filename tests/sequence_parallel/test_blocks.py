"""What is in, between and around the blocks of a model that shares its sequences is right, or refused on all ranks."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.sequence_parallel.share import find_shared
from tests.models import H
from tests.sequence_parallel.models import GPT, VOCAB, Block, Pooled, body, causal, ids
from tests.sequence_parallel.runs import against_whole
from tests.world import World


def in_order(order: list[int]) -> tuple[float, str]:
    try:
        error, _, message = against_whole(Pooled(order), {"input_ids": ids(2, 37)})
    except RuntimeError as refused:
        return 0.0, str(refused)
    return error, message


@pytest.mark.parametrize("order", [[0, 1], [2, 1, 0]], ids=["early exit", "reversed"])
def test_chain_that_is_not_closed(order: list[int], world: World) -> None:
    """A loss of hidden states that the last block never gathered is refused before a weight gets a gradient."""
    for _, message in world(in_order, order):
        assert "the last of the blocks was not called after it" in message


@pytest.mark.parametrize("order", [[0, 1, 1, 2], [0, 1, 2, 2], [0, 1, 2] * 2, [1, 2]], ids=str)
def test_blocks_that_run_again(order: list[int], world: World) -> None:
    """Blocks that run again, in a loop or in a row, and a first block that is left out, are right."""
    for error, message in world(in_order, order):
        assert message == ""
        assert error < 1e-12


class Exits(Pooled):
    """Returns the hidden states of an early block in evaluation."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks if self.training else self.blocks[:2]:
            x = block(x)
        return x.mean(1).square().sum()


def exits_early() -> str:
    policy = SequenceParallel(2, self_check=False)  # which runs the model in evaluation, and refuses it at once
    with lt_tiled.prepare(model := Exits([]), sequence_parallel=policy), torch.no_grad():
        model(ids(2, 37))
        with pytest.raises(RuntimeError) as refused:
            model.eval()(ids(2, 37))
        with pytest.raises(IndexError):
            model.train()(ids(2, 37) + VOCAB)
        model(ids(2, 37))
    return str(refused.value)


def test_early_exit_in_evaluation(world: World) -> None:
    """A model that leaves its blocks out in evaluation does not return the tokens of one rank, and trains on."""
    for message in world(exits_early):
        assert "the last of the blocks was not called after it" in message


def first_block_again() -> str:
    return against_whole(Pooled([0, 0, 1, 2]), {"input_ids": ids(2, 38)})[2]


def test_first_block_twice(world: World) -> None:
    """The tokens of one rank are not shared again by a first block that runs twice in a row."""
    for message in world(first_block_again):
        assert re.search("the first block, was called again before the last one.*name one module around", message)


class Between(Pooled):
    """Something is done with the hidden states between the blocks, or kept from there."""

    def __init__(self, change: str) -> None:
        super().__init__([0, 1, 2])
        self.change = change

    def forward(self, input_ids: Tensor) -> Tensor:
        x, kept = self.embed(input_ids), 0
        for block in self.blocks:
            x = block(x)
            if self.change == "scale":
                x = 2 * x
            elif self.change == "center":
                x = x - x.mean(1, keepdim=True)
            elif self.change == "shift":
                x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
            else:
                kept = kept + x.square().mean()
        return x.mean(1).square().sum() + kept


def between(change: str) -> tuple[float, str]:
    error, _, message = against_whole(Between(change), {"input_ids": ids(2, 37)})
    return error, message


@pytest.mark.parametrize("change", ["scale", "center", "shift", "loss of each block"])
def test_code_between_blocks(change: str, world: World) -> None:
    """Code between the blocks that needs all tokens is refused; what each token needs alone is right."""
    for error, message in world(between, change):
        if change == "scale":
            assert message == ""
            assert error < 1e-12
        else:
            assert "when 2 ranks share the sequence" in message


class Recomputed(GPT):
    """A GPT whose blocks have reentrant activation checkpointing of their own."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


def recomputed() -> tuple[float, int, str]:
    torch.manual_seed(0)
    return against_whole(Recomputed().double(), {"input_ids": ids(2, 37)})


def test_reentrant_checkpoints(world: World) -> None:
    """Blocks inside of reentrant checkpoints are recomputed in the region of their forward pass."""
    for error, _, message in world(recomputed):
        assert message == ""
        assert error < 1e-12


def own_checkpointing() -> str:
    model: Any = causal("llama")()
    model.gradient_checkpointing_enable()
    with (
        lt_tiled.prepare(model.train(), sequence_parallel=2),
        pytest.raises(RuntimeError, match="inside of its blocks") as refused,
    ):
        model(input_ids=ids(2, 24), labels=ids(2, 24))
    return str(refused.value)


def test_gradient_checkpointing_of_transformers(world: World) -> None:
    """Activation checkpointing of transformers, which would recompute attention alone, is refused with the remedy."""
    for message in world(own_checkpointing):
        assert re.search(r"activation_checkpointing=True\) in place of gradient_checkpointing_enable\(\)", message)


class Averaged(Block):
    """A block that adds a little of the mean over tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        return x + 0.01 * x.mean(1, keepdim=True)


def averaged() -> str:
    return against_whole(Pooled([0, 1, 2], Averaged).float(), {"input_ids": ids(2, 37)})[2]


def test_small_mixing_of_tokens(world: World) -> None:
    """The self-check in float32 sees tokens that are mixed outside of attention by a thousandth."""
    for message in world(averaged):
        assert "It may mix tokens in other code than an attention function" in message


class ShiftsALittle(nn.Module):
    """A block without attention that adds a little of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + 3e-3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def shifts() -> str:
    return against_whole(Pooled([0, 1, 2], ShiftsALittle).float(), {"input_ids": ids(2, 37)})[2]


def test_small_mixing_without_attention(world: World) -> None:
    """The self-check of a float32 model without attention has the tolerance of float32, not that of 16 bits."""
    for message in world(shifts):
        assert "has another output when 2 ranks share the sequence" in message


class FailsOnFewTokens(Block):
    """A block whose output is no number where it is given few tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) / (x.shape[1] > 6)


def not_finite() -> str:
    return against_whole(Pooled([0, 1, 2], FailsOnFewTokens), {"input_ids": ids(2, 37)})[2]


def test_values_that_are_not_finite(world: World) -> None:
    """The self-check refuses shared values that are not finite where those of all tokens are."""
    for message in world(not_finite):
        assert "when 2 ranks share the sequence" in message


def named_in_a_row() -> list[float]:
    """The errors of the losses of a named module for 38 tokens, and then for as many as a rank had of these."""
    model, found = body()(), []
    for policy in (None, SequenceParallel(2, targets="body")):
        with lt_tiled.prepare(model, sequence_parallel=policy) if policy else nullcontext():
            found.append(torch.stack([model(ids(2, tokens), ids(2, tokens)).detach() for tokens in (38, 19)]))
    return (found[1] - found[0]).abs().tolist()


def test_named_module_in_a_row(world: World) -> None:
    """A named module that returns a loss leaves no region open, whatever length its next input has."""
    for errors in world(named_in_a_row):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("layer", [nn.Conv1d(H, H, 3), nn.GRU(H, H), nn.BatchNorm1d(H)], ids=lambda m: type(m).__name__)
def test_layers_that_mix_tokens(layer: nn.Module) -> None:
    """Convolutions, recurrent layers and batch norms are refused by name, whatever their weights are."""
    model = GPT()
    model.blocks[1].mixing = layer
    with pytest.raises(ValueError, match=rf"blocks.1.mixing \({type(layer).__name__}\) mixes tokens"):
        find_shared(model, SequenceParallel(2), None)


class InModuleDict(nn.Module):
    """Keeps its blocks in a ``ModuleDict``, as nanoGPT and LitGPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return x


def test_the_caller_of_blocks_in_a_module_dict() -> None:
    """The module that calls the blocks, whose code around them is checked, is the nearest one with a forward."""
    model = InModuleDict()
    (part,) = find_shared(model, SequenceParallel(2), None)
    assert part.caller is model
