"""What users' code computes in a model that shares its sequences is that of all tokens, or is refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_tiled
from lt_tiled import SequenceParallel
from tests.sequence_parallel.models import GPT, Block, Pooled, causal, ids, no_labels
from tests.sequence_parallel.runs import Counts, against_whole, step, worst
from tests.world import World


def labeled(tokens: int = 37) -> dict[str, Any]:
    return {"input_ids": (x := ids(2, tokens)), "labels": x}


# Noise


def noisy_llama() -> Any:
    """A Llama with NEFTune, whose noise depends on the length."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model: Any = causal("llama")()
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
    return model


def with_noise() -> tuple[float, str]:
    """The error of a step with one seed on all ranks."""
    model = noisy_llama()
    reference, found = copy.deepcopy(model), []
    lt_tiled.prepare(reference, loss=True)
    with lt_tiled.prepare(model, sequence_parallel=2, loss=True):
        for one in (reference, model):
            torch.manual_seed(0)
            found.append(step(one, labeled()))
    return worst(found[1], found[0]), ""


def test_noise_of_a_hook(world: World) -> None:
    """Noise that a hook adds to the embeddings has the size that all tokens give it."""
    for error, _ in world(with_noise):
        assert error < 1e-12


def collectives_with_noise() -> dict[str, int]:
    model, policy = noisy_llama(), SequenceParallel(2, self_check=False)
    with lt_tiled.prepare(model, sequence_parallel=policy, loss=True), Counts() as counts:
        output = model(**labeled())
        output.loss.backward()
    assert output.logits is None
    return {name: count for name, count in counts.found.items() if count and name not in ("reads", "attention")}


def test_noise_of_a_hook_leaves_the_loss_shared(world: World) -> None:
    """Only the embeddings are computed for all tokens: logits and the loss are those of the rank's own."""
    assert world(collectives_with_noise) == [{"all_to_all": 2 * 4, "group_mean": 1}] * 2


class Noisy(nn.Embedding):
    """Embeddings of a user, which are divided by the root of the length in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (x.shape[1] ** 0.5 if self.training else 1)


def with_own_embeddings() -> tuple[float, int, str]:
    model: Any = causal("llama")()
    own = Noisy(*model.model.embed_tokens.weight.shape).double()
    own.load_state_dict(model.model.embed_tokens.state_dict())
    model.model.embed_tokens = own
    return against_whole(model, labeled())


def test_own_module_before_the_blocks(world: World) -> None:
    """A user's module before the blocks gets all tokens."""
    for error, exchanges, message in world(with_own_embeddings):
        assert message == ""
        assert exchanges == 2
        assert error < 1e-12


# Hooks

COLLECTED: list[Tensor] = []


def collect(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that collects a regularizer."""
    COLLECTED.append((output if isinstance(output, Tensor) else output[0]).square().mean())


def regularized(path: str, labels: bool) -> tuple[float, str]:
    """The error of a loss to which a hook's regularizer is added, or the message if it is refused."""
    model: Any = causal("llama")()
    model.get_submodule(path).register_forward_hook(collect)
    given, found = labeled() if labels else no_labels(ids(2, 37)), []
    for policies in ({}, {"sequence_parallel": 2}):
        with lt_tiled.prepare(model, loss=True, **policies):
            COLLECTED.clear()
            try:
                output = model(**given)
            except ValueError as error:
                return 0.0, str(error)
            value = output.logits.square().mean() if output.loss is None else output.loss
            found.append(torch.stack([value.detach(), COLLECTED[-1].detach()]))
    return float((found[1] - found[0]).abs().max()), ""


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.1", "model.norm"])
def test_hook_outside_of_the_blocks(path: str, labels: bool, world: World) -> None:
    """Hooks on the embeddings, the last block and the last norm collect what all tokens give."""
    for error, message in world(regularized, path, labels):
        assert message == ""
        assert error < 1e-12


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("path", ["model.layers.0", "model.layers.1.mlp"])
def test_hook_in_the_blocks(path: str, labels: bool, world: World) -> None:
    """A hook that would get the tokens of one rank is refused by its name."""
    for _, message in world(regularized, path, labels):
        assert re.search(
            rf"{path} \(Llama.*\) has the hook collect, .* Remove it, or put it on a module outside", message
        )


# Attributes


class Balanced(Block):
    """A block that keeps a loss in an attribute, in training alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.balance = {"loss": [x.square().mean()]} if self.training else None
        return super().forward(x, mask)


class Counted(Block):
    """A block that keeps a statistic of its tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.statistic = float(x.square().mean())
        return super().forward(x, mask)


def keeping(block: Callable[[], nn.Module]) -> str:
    return against_whole(Pooled([0, 1, 2], block), {"input_ids": ids(2, 37)})[2]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Balanced, r"keeps balance\['loss'\]\[0\], which it computed with a graph from the tokens of one rank"),
        (Counted, "keeps statistic, which is another value where ranks share a sequence"),
    ],
)
def test_values_in_attributes(block: Callable[[], nn.Module], message: str, world: World) -> None:
    """A loss or a statistic that a block keeps of the tokens of one rank is refused by its name."""
    for found in world(keeping, block):
        assert re.search(message, found)


class CountsCalls(Block):
    """A block that counts its calls in place, in a buffer, an attribute and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_buffer", torch.zeros(()))
        self.in_attribute, self.in_list = torch.zeros(()), [torch.zeros(())]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for count in (self.in_buffer, self.in_attribute, *self.in_list):
            count += 1
        return super().forward(x, mask)


def counted(policies: dict[str, Any]) -> list[float]:
    with lt_tiled.prepare(model := Pooled([0, 1, 2], CountsCalls), **policies):
        model(ids(2, 37))
    block: Any = model.blocks[1]
    return [float(count) for count in (block.in_buffer, block.in_attribute, *block.in_list)]


def test_counters_in_place(world: World) -> None:
    """A counter that a block changes in place counts the calls of the step, and not those of the self-check."""
    for counts in world(counted, {"sequence_parallel": 2}):
        assert counts == [1, 1, 1]


def keep_balance(module: Any, x: Tensor) -> Tensor:
    module.balance = x.square().mean()
    return type(module).forward(module, x)


def keeping_in_llama(labels: bool) -> str:
    model: Any = causal("llama")()
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: keep_balance(mlp, x)
    return against_whole(model, labeled() if labels else no_labels(ids(2, 37)))[2]


@pytest.mark.parametrize("labels", [True, False])
def test_values_in_attributes_of_a_causal_model(labels: bool, world: World) -> None:
    """The same in a model of transformers."""
    for message in world(keeping_in_llama, labels):
        assert re.search(r"keeps .*balance, which", message)


class Positioned(GPT):
    """A GPT whose blocks read the positions of all tokens from an attribute."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            block.where = self.positions(torch.arange(x.shape[1]))
            x = block(x + 0)
        return self.head(self.norm(x))


class ReadsPositions(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + self.where, mask)


def positioned() -> str:
    torch.manual_seed(0)
    model = Positioned()
    model.blocks = nn.ModuleList(ReadsPositions() for _ in range(2))
    return against_whole(model.double(), {"input_ids": ids(2, 37)})[2]


def test_positions_in_an_attribute(world: World) -> None:
    """A block that reads the positions of all tokens from an attribute is refused, with the remedy."""
    for message in world(positioned):
        assert re.search("from an attribute, as positions.* Pass it what it reads as an argument", message)


def local_positions() -> str:
    """A Llama whose attention counts positions from the tokens that it is given, and reads them from an attribute."""
    model: Any = causal("llama")()
    for layer in model.model.layers:
        attention = layer.self_attn

        def forward(hidden_states: Tensor, attention: Any = attention, **kwargs: Any) -> Any:
            attention.positions = torch.arange(hidden_states.shape[1])
            scale = 1 + attention.positions[:, None].double() / 10
            return type(attention).forward(attention, hidden_states * scale, **kwargs)

        attention.forward = forward
    return against_whole(model, labeled())[2]


def test_positions_of_a_rank_in_an_attribute(world: World) -> None:
    """Positions that a block counts from its own tokens are seen in what attention is given."""
    for message in world(local_positions):
        assert re.search("gives attention 0 other queries .*may compute positions from the number of tokens", message)


# Early exits


def exits(labels: bool) -> tuple[float, int, str]:
    """A Llama that leaves out its last block, as transformers does by its configuration."""
    model: Any = causal("llama", num_hidden_layers=3)()
    model.config.num_hidden_layers = 2
    given = labeled() if labels else no_labels(ids(2, 37))
    try:
        return against_whole(model, given)
    except RuntimeError as error:
        return 0.0, 0, str(error)


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
