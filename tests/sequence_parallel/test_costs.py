"""What shared sequences cost: collectives for each layer, attention and memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel
from lt_tiled.sequence_parallel.groups import Groups
from tests.meters import peak_bytes
from tests.sequence_parallel.cases import CASES, labeled, no_labels
from tests.sequence_parallel.hybrids import causal
from tests.sequence_parallel.models import Block, Pooled, ids
from tests.sequence_parallel.runs import Counts
from tests.world import World


def counts(name: str, keep: Any) -> Counter[str]:
    """The operations of a checkpointed step without a self-check."""
    model, policy = CASES[name].build(), SequenceParallel(2, self_check=False)
    checkpointing = ActivationCheckpointing(keep=keep)
    (inputs,) = CASES[name].inputs()
    with (
        lt_tiled.prepare(model, sequence_parallel=policy, activation_checkpointing=checkpointing, loss=True),
        Counts() as counted,
    ):
        model(**inputs).loss.backward()
    return counted.found


LAYERS = {"llama": (4, 0, 2), "qwen3_next": (4, 1, 1), "bamba": (4, 1, 1), "lfm2": (2, 1, 1), "mamba2": (4, 2, 0)}
"""The all-to-alls of a forward pass of two layers, their convolutions, and their attention."""


@pytest.mark.table("llama-.*|bamba-attention|lfm2-None|mamba2-None")
@pytest.mark.parametrize("keep", [None, "attention"])
@pytest.mark.parametrize("name", LAYERS)
def test_collectives(name: str, keep: str | None, world: World) -> None:
    """A layer with attention or a state makes two all-to-alls in the forward pass, two in the backward pass, and two in
    its recompute unless they are kept, as attention itself is then. A convolution gathers the last tokens, in the
    recompute as well. A step makes one all-reduce for the loss, or gathers its hidden states in front of it in a model
    without rotary positions.
    """
    exchanges, convolutions, attention = LAYERS[name]
    passes, gathered = 2 if keep else 3, int(name == "mamba2")
    for found in world(counts, name, keep):
        assert found["all_to_all"] == passes * exchanges
        assert found["all_gather"] == 2 * convolutions + gathered
        assert found["reduce_scatter"] == convolutions + gathered
        assert found["group_mean"] == 1 - gathered
        assert found["attention"] == (passes - 1) * attention


def tables() -> int:
    """The number of rotary tables that the layers of a shared pass are given."""
    model: Any = causal("llama")()
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: found.append(kwargs["position_embeddings"][0]), with_kwargs=True
        )
    with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(2, self_check=False)):
        model(**labeled(ids(2, 24)))
    return len({id(table) for table in found})


def test_one_table(world: World) -> None:
    """All layers are given the same rotary tables, of which activation checkpointing then saves one."""
    assert world(tables) == [1, 1]


class Scaled(Block):
    """Is given a factor for each token."""

    def forward(self, x: Tensor, factors: Any = None) -> Tensor:
        return super().forward(x * factors)


class Refilled(Pooled):
    """Changes the factors in place for each block."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x, factors = self.embed(input_ids), torch.ones(*input_ids.shape, 1)
        for block in self.blocks:
            x = block(x, factors.add_(torch.arange(input_ids.shape[1])[:, None]))
        return x.mean(1).square().sum()


def refilled(inference: bool) -> float:
    model, x = Refilled(block=Scaled).eval(), ids(2, 24)
    with torch.no_grad(), torch.inference_mode(inference):
        plain = model(x)
        with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(2, self_check=False)):
            return float((model(x) - plain).abs() / plain)


def test_a_table_for_each_block(world: World) -> None:
    """Blocks are given what their model put into one tensor for each of them, in inference mode, too."""
    for inference in (True, False):
        assert max(world(refilled, inference)) < 1e-5


def peaks(tokens: int, policies: dict[str, Any]) -> tuple[int, int]:
    """The peaks of the bytes alive in a step of four ranks, and in one of a single rank on a quarter of the tokens."""
    found = []
    fields = {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 256}
    for size in (4, 1):
        model = causal("llama", **fields)().float()
        inputs = no_labels(x := ids(1, tokens * size // 4)) | {"labels": x}

        def run(model: nn.Module = model, inputs: dict[str, Any] = inputs) -> None:
            model.zero_grad(set_to_none=True)
            model(**inputs).loss.backward()

        with lt_tiled.prepare(model, sequence_parallel=size, group=Groups.of_size(size).group, **policies):
            run()  # learns, and checks
            found.append(peak_bytes(run))
    return found[0], found[1]


@pytest.mark.full
def test_a_quarter_of_the_tokens(four_ranks: World) -> None:
    """A rank of four that share a sequence has the peak of one rank with a quarter of the tokens."""
    policies = {"activation_checkpointing": True, "tiling": True, "loss": True}
    for shared, alone in four_ranks(peaks, 2048, policies):
        assert shared <= 1.05 * alone
