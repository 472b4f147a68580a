"""What is in, between and around the blocks of a model that shares its sequences is right, or refused on all ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.sequence_parallel.enable import find_doors
from tests.models import H
from tests.sequence_parallel.models import GPT, VOCAB, Block, Pooled, body, causal, ids, no_labels
from tests.sequence_parallel.runs import against_whole, step, worst
from tests.world import World


def in_order(order: list[int]) -> tuple[float, str]:
    error, _, message = against_whole(Pooled(order), {"input_ids": ids(2, 37)})
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
        with pytest.raises(ValueError, match="the last of the blocks") as refused:
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
    """Blocks inside of reentrant checkpoints, which forget that ranks share the sequence, are refused."""
    for _, _, message in world(recomputed):
        assert re.search("activation checkpointing of its own.*Use lt_tiled's", message)


def own_checkpointing() -> str:
    model: Any = causal("llama")()
    model.gradient_checkpointing_enable()
    with (
        lt_tiled.prepare(model.train(), sequence_parallel=2),
        pytest.raises(ValueError, match="of its own in its blocks") as refused,
    ):
        model(input_ids=ids(2, 24), labels=ids(2, 24))
    return str(refused.value)


def test_gradient_checkpointing_of_transformers(world: World) -> None:
    """Activation checkpointing of transformers, which would recompute attention alone, is refused with the remedy."""
    for message in world(own_checkpointing):
        assert re.search(r"activation_checkpointing=True\) in place of gradient_checkpointing_enable", message)


class Averaged(Block):
    """A block that adds a little of the mean over tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        return x + 0.01 * x.mean(1, keepdim=True)


class ShiftsALittle(nn.Module):
    """A block without attention that adds a little of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + 3e-3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class FailsOnFewTokens(Block):
    """A block whose output is no number where it is given the tokens of one rank."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) / (x.shape[1] > 20)


class Positioned(GPT):
    """A GPT whose blocks read the positions of all tokens from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsPositions() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            block.where = self.positions(torch.arange(x.shape[1]))
            x = block(x + 0)
        return self.head(self.norm(x))


class ReadsPositions(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + self.where, mask)


def positions_of_a_rank() -> nn.Module:
    """A Llama whose attention counts positions from the tokens that it is given."""
    model: Any = causal("llama")()
    for layer in model.model.layers:
        attention = layer.self_attn

        def forward(hidden_states: Tensor, attention: Any = attention, **kwargs: Any) -> Any:
            scale = 1 + torch.arange(hidden_states.shape[1])[:, None].double() / 10
            return type(attention).forward(attention, hidden_states * scale, **kwargs)

        attention.forward = forward
    return model


class Normalized(Block):
    """A block with a norm over all tokens in training, as a batch norm."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        return x / x.std((0, 1)) if self.training else x


class SomeTokens(Block):
    """A mixture of depths: in training half of the tokens go through the MLP, in evaluation those above a threshold."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x.sum(-1)
        chosen = scores > (scores.median(1, keepdim=True).values if self.training else 0)
        return super().forward(x, mask).where(chosen[..., None], x)


class ClippedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Clipped(Block):
    """A block that clips the gradient of all tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(ClippedBack.apply(x), mask)


SEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean": (lambda: Pooled([0, 1, 2], Averaged).float(), "It mixes tokens outside of attention"),
    "shift": (lambda: Pooled([0, 1, 2], ShiftsALittle).float(), "has another .* when 2 ranks share the sequence"),
    "in training": (lambda: Pooled([0, 1, 2], Normalized), "has another .* when 2 ranks share the sequence"),
    "depths": (lambda: Pooled([0, 1, 2], SomeTokens), "has another .* when 2 ranks share the sequence"),
    "backward pass": (lambda: Pooled([0, 1, 2], Clipped), "has another gradient of its input when 2 ranks"),
    "not finite": (lambda: Pooled([0, 1, 2], FailsOnFewTokens), "has another output when 2 ranks share the sequence"),
    "attribute": (
        lambda: Positioned().double(),
        "cannot run on those of one rank.* Pass blocks what they read as arguments",
    ),
    "positions": (
        positions_of_a_rank,
        "has another .*computes positions",
    ),
}
"""What the self-check finds, and what it says."""


def seen(name: str) -> str:
    torch.manual_seed(0)
    return against_whole(SEEN[name][0](), {"input_ids": ids(2, 37)})[2]


@pytest.mark.parametrize("name", SEEN)
def test_self_check(name: str, world: World) -> None:
    """The self-check sees tokens that are mixed outside of attention by a thousandth, in float32 too, values that are
    not finite, and positions that are not those of all tokens.
    """
    for message in world(seen, name):
        assert re.search(SEEN[name][1], message)


class LeavesItselfOut(Block):
    """A block that leaves itself out at random."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if torch.rand(()) < 0.1 else super().forward(x, mask)


def left_out(seed: int) -> str:
    """What a step says where ranks have the seed, and the other one another."""
    model = Pooled([0, 1, 2], LeavesItselfOut)
    torch.manual_seed(seed * dist.get_rank())
    with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(2, self_check=False)):
        try:
            for _ in range(8):
                model(ids(2, 37)).backward()
        except ValueError as error:
            return str(error)
    return ""


def test_blocks_that_leave_themselves_out(world: World) -> None:
    """Ranks that leave out different blocks all raise, and those that draw the same numbers train."""
    assert world(left_out, 0) == ["", ""]
    for message in world(left_out, 1):
        assert re.search("on this rank, and something else on another rank.*draw the same numbers", message)


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
    (part,) = find_doors(model, SequenceParallel(2), None)
    assert part.caller is model


def with_noise() -> float:
    """The error of a step of a Llama with NEFTune, with one seed on all ranks."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model, found = causal("llama")(), []
    embeddings: Any = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)
    reference, given = copy.deepcopy(model), {"input_ids": ids(2, 37), "labels": ids(2, 37)}
    lt_tiled.prepare(reference, loss=True)
    with lt_tiled.prepare(model, sequence_parallel=2, loss=True):
        for one in (reference, model):
            torch.manual_seed(0)
            found.append(step(one, given))
    return worst(found[1], found[0])


def test_noise_of_embeddings(world: World) -> None:
    """NEFTune's noise of the embeddings has the size that all tokens give it."""
    for error in world(with_noise):
        assert error < 1e-12


class CountsCalls(Block):
    """A block that counts its calls in a buffer, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x, mask) * self.calls


def counted() -> float:
    with lt_tiled.prepare(model := Pooled([0, 1, 2], CountsCalls), sequence_parallel=2):
        model(ids(2, 37))
    return float(model.blocks[1].calls)


def test_counters_in_place(world: World) -> None:
    """A buffer that a block changes in place counts the calls of the step, and not those of the self-check."""
    assert world(counted) == [1, 1]


def exits(labels: bool) -> tuple[float, int, str]:
    """A Llama that leaves out its last block, as transformers does by its configuration."""
    model: Any = causal("llama", num_hidden_layers=3)()
    model.config.num_hidden_layers = 2
    given = {"labels": ids(2, 37)} if labels else {}
    return against_whole(model, no_labels(ids(2, 37)) | given)


def test_early_exit_with_labels(world: World) -> None:
    """A causal model with labels, which is shared up to its loss, may leave its last blocks out."""
    for error, exchanges, message in world(exits, True):
        assert message == ""
        assert exchanges == 2
        assert error < 1e-12


def test_early_exit_without_labels(world: World) -> None:
    """Without labels the last block gathers the tokens, and a call that leaves it out is refused."""
    for _, _, message in world(exits, False):
        assert "the last of the blocks was not called after it" in message
