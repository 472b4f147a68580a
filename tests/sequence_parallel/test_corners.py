"""Models and calls that look ordinary and could share a sequence wrongly: they are right, or refused on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_tiled
from lt_tiled import SequenceParallel
from tests.models import H
from tests.sequence_parallel.models import GPT, VOCAB, Block, HeadsBlock, causal, ids
from tests.sequence_parallel.test_models import against_whole
from tests.world import World


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
    return against_whole(Pooled([0, 0, 1, 2]), {"input_ids": ids(2, 38)}, batch="trust")[2]


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


class Biased(GPT):
    """A GPT with another mask for each of its four heads, and no dimension of rows."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = torch.stack([(distance >= 0) & (distance < 3 + head) for head in range(4)])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def biased() -> tuple[float, int, str]:
    torch.manual_seed(0)
    return against_whole(Biased().double(), {"input_ids": ids(2, 37)})


def test_masks_of_heads(world: World) -> None:
    """A mask ``[heads, S, S]`` is cut to the rank's heads."""
    for error, _, message in world(biased):
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
        assert re.search(r"checkpointing=True\) in place of gradient_checkpointing_enable\(\)", message)


class Normed(HeadsBlock):
    """Attention with its norm inside."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class NormOfAllHeads(HeadsBlock):
    """Attention whose queries are normalized over all heads, without a weight."""

    def __init__(self) -> None:
        super().__init__(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = F.layer_norm(q, q.shape[-1:])
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def in_head_tiles(block: Callable[[], nn.Module]) -> str:
    return against_whole(Pooled([0, 1, 2], block, 32), {"input_ids": ids(2, 37)}, head_tiles=2)[2]


def test_head_tiles_with_a_norm_inside(world: World) -> None:
    """An attention module that projects something else than its input has no gradients in parts, and is refused."""
    for message in world(in_head_tiles, Normed):
        assert re.search("is not given the module's own input.*set head_tiles=1", message)


def test_head_tiles_with_a_norm_of_all_heads(world: World) -> None:
    """What a module computes of all of its heads differs in parts, and the self-check says so."""
    for message in world(in_head_tiles, NormOfAllHeads):
        assert re.search("another output when its heads are computed in 2 parts.*set head_tiles=1", message)


def of_olmo() -> str:
    inputs = {"input_ids": (x := ids(2, 24)), "labels": x}
    return against_whole(causal("olmo2")(), inputs, head_tiles=2)[2]


def test_head_tiles_with_weights_of_all_heads(world: World) -> None:
    """A norm with weights for all heads is refused with a remedy."""
    for message in world(of_olmo):
        assert re.search("cannot compute some of its heads.*Set head_tiles=1", message)


def mean_of_own(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
    """A user's loss, which divides by the labels that it is given."""
    targets = F.pad(labels[..., 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_loss_function() -> tuple[float, int, str]:
    model: Any = causal("llama")()
    model.loss_function = mean_of_own
    x = ids(2, 37)
    return against_whole(model, {"input_ids": x, "labels": x.where(torch.arange(37) > 15, -100)})


def test_own_loss_function(world: World) -> None:
    """A user's loss function gets the logits of all tokens: it may divide by the labels that it is given."""
    for error, exchanges, message in world(with_loss_function):
        assert message == ""
        assert exchanges
        assert error < 1e-12


def with_ignore_index() -> tuple[float, int, str]:
    return against_whole(causal("llama")(), {"input_ids": (x := ids(2, 37)), "labels": x, "ignore_index": 3})


def test_other_ignore_index(world: World) -> None:
    """The last label of a sequence is the ``ignore_index`` of the call; otherwise one rank fails, and others wait."""
    for error, _, message in world(with_ignore_index):
        assert message == ""
        assert error < 1e-12


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


@pytest.mark.parametrize("layer", [nn.Conv1d(H, H, 3), nn.GRU(H, H), nn.BatchNorm1d(H)], ids=lambda m: type(m).__name__)
def test_layers_that_mix_tokens(layer: nn.Module) -> None:
    """Convolutions, recurrent layers and batch norms are refused by name, whatever their weights are."""
    model = GPT()
    model.blocks[1].mixing = layer
    with pytest.raises(ValueError, match=rf"blocks.1.mixing \({type(layer).__name__}\) mixes tokens"):
        lt_tiled.prepare(model, sequence_parallel=SequenceParallel(1, head_tiles=2))
