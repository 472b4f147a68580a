"""What a model computes from the length or the positions of a sequence is that of all tokens, or is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.sequence_parallel.groups import Groups
from lt_tiled.sequence_parallel.self_check import Checked, lengths_of
from lt_tiled.sequence_parallel.ulysses import UlyssesState
from tests.sequence_parallel.models import CASES, Block, Pooled, causal, ids, no_labels, padded
from tests.sequence_parallel.runs import against_whole, step, worst
from tests.world import World

SWITCH = 24
"""The number of tokens above which positions are others."""


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    longest = {"max_position_embeddings": SWITCH if kind == "dynamic" else 4 * SWITCH}
    return longest | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | fields}


_LONG = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": SWITCH}
_PHI = {"original_max_position_embeddings": SWITCH, "bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.0}
_LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 6}
_PER_LAYER = {
    "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", _rope("dynamic", factor=4.0)),
    "longrope": ("phi3", _PHI | _rope("longrope", **_LONG)),
    "yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=SWITCH)),
    "llama3": (
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=SWITCH),
    ),
    "linear": ("llama", _rope("linear", factor=4.0)),
    "one for each kind of layer": (
        "gemma3_text",
        _LAYERS | {"max_position_embeddings": SWITCH, "rope_parameters": _PER_LAYER},
    ),
}


def errors_of_rope(name: str, size: int) -> dict[str, float]:
    """The errors of one model on both sides of the switch, there and back, with labels and without."""
    architecture, fields = ROPES[name]
    models, found = [causal(architecture, **fields)() for _ in range(2)], {}
    lt_tiled.prepare(models[0], loss=True)
    policy = SequenceParallel(size)
    with lt_tiled.prepare(models[1], sequence_parallel=policy, group=Groups.of_size(size).group, loss=True):
        for tokens in (SWITCH - 5, SWITCH + 13, SWITCH - 5, SWITCH + 1):
            x = ids(2, tokens)
            for given in ({"input_ids": x, "labels": x}, no_labels(x)):
                true, shared = (step(model, given) for model in models)
                found[f"{tokens} tokens, labels: {'labels' in given}"] = worst(shared, true)
    return found


@pytest.mark.table("(dynamic|longrope)-2|one for each kind of layer-4")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ROPES)
def test_rope(name: str, size: int, four_ranks: World) -> None:
    """Positions that are others above a length have the loss and gradients of one process on both sides of it."""
    for found in four_ranks(errors_of_rope, name, size):
        assert max(found.values()) < (3e-7 if name == "one for each kind of layer" else 1e-12), found


def _opt(**given: Any) -> tuple[nn.Module, dict[str, Any]]:
    """OPT on padding on the left, which its positions do not count."""
    model = causal("opt", word_embed_proj_dim=32, ffn_dim=96, dropout=0.0)()
    return model, padded(True)(ids(2, 37)) | given


def _roberta(**given: Any) -> tuple[nn.Module, dict[str, Any]]:
    """RoBERTa, which makes its positions from token ids that are no padding, and begins with 1."""
    return causal("roberta", is_decoder=True, **_NO_DROPOUT)(), padded(False)(ids(2, 37)) | given


def _bart(**given: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The decoder of BART, which takes no positions."""
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "dropout": 0.0}
    return causal("bart", **sizes)(), padded(True)(ids(2, 37)) | given


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MADE_POSITIONS = {"OPT": _opt, "RoBERTa": _roberta, "BART": _bart}


def made_positions(name: str, labels: bool) -> tuple[float, int, str]:
    model, given = MADE_POSITIONS[name](use_cache=False)
    if not labels:
        del given["labels"]
    return against_whole(model, given)


@pytest.mark.table("2-.*|4-OPT-True")
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("name", MADE_POSITIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_positions_as_the_model_makes_them(size: int, name: str, labels: bool, world: World, four_ranks: World) -> None:
    """Positions from the mask, from token ids, and from the number of tokens, are those of all tokens."""
    for error, exchanges, message in {2: world, 4: four_ranks}[size](made_positions, name, labels):
        assert message == ""
        assert exchanges == 2
        assert error < 1e-12


_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "shared_expert_intermediate_size": 32}
GIVEN = {"plain": CASES["llama"].given, "padded": padded(True)}


def balanced(architecture: str, given: str, policies: dict[str, Any]) -> tuple[float, list[float]]:
    """The error of a step, and how far the router's loss and its logits are from those of one process."""
    models = [causal(architecture, **_EXPERTS, **_BALANCED)() for _ in range(2)]
    inputs, outputs, steps = GIVEN[given](ids(2, 37)), [], []
    for model, sequence_parallel in zip(models, (None, dist.get_world_size()), strict=True):
        with lt_tiled.prepare(model, sequence_parallel=sequence_parallel, loss=True, **policies):
            steps.append(step(model, inputs))
            outputs.append(model(**inputs))
    found = [float((outputs[1].aux_loss - outputs[0].aux_loss).detach())]
    for mine, true in zip(outputs[1].router_logits, outputs[0].router_logits, strict=True):
        found.append(float((mine - true).detach().abs().max()))
    return worst(steps[1], steps[0]), found


@pytest.mark.table("2-mixtral-padded-.*|4-qwen3_moe-plain-.*activation.*")
@pytest.mark.parametrize("policies", [{}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_loss_of_the_router(
    size: int, architecture: str, given: str, policies: dict[str, Any], world: World, four_ranks: World
) -> None:
    """The loss that balances experts, its gradients and the router logits are those of all tokens but padding."""
    for error, others in {2: world, 4: four_ranks}[size](balanced, architecture, given, policies):
        assert error < 1e-12
        assert max(map(abs, others)) < 1e-12


# The self-check


NAMED = {
    "mistral": ({"sliding_window": 14}, [14]),
    "llama": (_rope("dynamic", factor=4.0), [SWITCH]),
    "phi3": (_PHI | _rope("longrope", **_LONG), [SWITCH]),
    "gemma3_text": (_LAYERS | {"max_position_embeddings": SWITCH, "rope_parameters": _PER_LAYER}, [6, SWITCH]),
    "llama4_text": ({"attention_chunk_size": 512, "floor_scale": 300}, [300, 512]),
}
"""Fields of configurations, and the numbers of tokens that they name."""


@pytest.mark.parametrize("architecture", NAMED)
def test_named_lengths(architecture: str) -> None:
    """Windows, chunks, original lengths and scales of positions are read from the configuration."""
    from transformers import AutoConfig

    fields, lengths = NAMED[architecture]
    config = AutoConfig.for_model(architecture, hidden_size=32, num_attention_heads=4, head_dim=8, **fields)
    assert set(lengths) <= set(lengths_of(config))


def checked_lengths(labels: bool) -> list[tuple[bool, int]]:
    """The modes and the lengths of the self-checks of a few calls."""
    model, found = causal("mistral", sliding_window=14, num_hidden_layers=1)(), []
    before = Checked._compared

    def compared(checked: Checked, call: Any, run: Any, training: bool, *others: Any) -> Any:
        found.append((training, call.tokens.shape[1]))
        return before(checked, call, run, training, *others)

    with pytest.MonkeyPatch.context() as patch, lt_tiled.prepare(model, sequence_parallel=2):
        patch.setattr(Checked, "_compared", compared)
        for tokens in (12, 37, 37, 100, 3000):
            x = ids(2, tokens)
            model(**({"input_ids": x, "labels": x} if labels else no_labels(x)))
        model.eval()(input_ids=ids(2, 3000), labels=ids(2, 3000))
    return found


@pytest.mark.parametrize("labels", [True, False])
def test_check_past_a_window(labels: bool, world: World) -> None:
    """The self-check runs once for each mode, and once more as soon as an input is longer than a window. An input that
    is too long is cut.
    """
    assert world(checked_lengths, labels) == [[(True, 12), (True, 37), (False, 2048)]] * 2


def without_all_positions(name: str) -> str:
    """What is said where rotary modules are given the positions of one rank."""
    architecture, fields = ROPES[name]
    model, x = causal(architecture, **fields)(), ids(2, 37)
    with pytest.MonkeyPatch.context() as patch, lt_tiled.prepare(model, sequence_parallel=2):
        patch.setattr(UlyssesState, "all_positions", lambda state, own: own)
        try:
            model(input_ids=x, labels=x)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", ["dynamic", "longrope", "one for each kind of layer"])
def test_check_past_a_position(name: str, world: World) -> None:
    """The self-check sees rope that depends on the length."""
    messages = world(without_all_positions, name)
    assert re.search("other position_embeddings in its blocks", messages[0])
    assert messages[0] == messages[1]


class LogScaled(Block):
    """A block whose output is scaled by the logarithm of the length above 64 tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * max(1.0, math.log(x.shape[1], 64))


def log_scaled(tokens: int) -> tuple[float, int, str]:
    return against_whole(Pooled([0, 1, 2], LogScaled), {"input_ids": ids(2, tokens)})


@pytest.mark.parametrize("tokens", [60, 100, 300])
def test_scale_of_the_length(tokens: int, world: World) -> None:
    """A scale that a hand-written block computes from the number of its tokens is refused where it differs."""
    for error, _, message in world(log_scaled, tokens):
        assert ("when 2 ranks share the sequence" in message) == (tokens > 64)
        assert error < 1e-12
