"""Layers that pass on a state from token to token, and causal convolutions, share sequences as attention does."""

from __future__ import annotations

import copy
import inspect
import re
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel
from lt_tiled.sequence_parallel.groups import Groups
from tests.sequence_parallel.hybrids import HYBRIDS, hybrid, wide
from tests.sequence_parallel.models import ids, no_labels, padded
from tests.sequence_parallel.runs import Counts, step, worst
from tests.world import World

EACH_KIND = ("qwen3_next", "bamba", "lfm2")
"""A gated delta rule, Mamba 2 and a convolution alone, each with attention."""


def with_labels(x: Tensor) -> dict[str, Any]:
    return {"input_ids": x, "labels": x}


def documents(x: Tensor) -> dict[str, Any]:
    """Two documents in one row, also for kernels."""
    ends = torch.tensor([0, 15, x.shape[1]], dtype=torch.int32)
    lengths = ends.diff().tolist()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    seq_idx = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor(lengths))[None]
    named = {"position_ids": positions, "cu_seq_lens_q": ends, "seq_idx": seq_idx}
    return {"input_ids": x[:1], "labels": x[:1], "use_cache": False, **named}


INPUTS = {"labels": with_labels, "no labels": no_labels, "padded left": padded(True), "padded right": padded(False)}
INPUTS["documents"] = documents


def error(
    name: str,
    inputs: str = "labels",
    size: int = 2,
    tokens: int = 37,
    fields: dict[str, Any] | None = None,
    policies: dict[str, Any] | None = None,
) -> float | str:
    """The error of a step that ``size`` ranks share, or why it is refused."""
    model = hybrid(name, **fields or {})
    given = INPUTS[inputs](ids(2, tokens))
    reference, group = copy.deepcopy(model), Groups.of_size(size).group
    try:
        with wide(model):
            with lt_tiled.prepare(reference, loss=True):
                true = step(reference, given)
            with lt_tiled.prepare(model, sequence_parallel=size, group=group, loss=True, **policies or {}):
                return worst(step(model, given), true)
    except ValueError as refused:
        return str(refused)


@pytest.mark.table("qwen3_next|bamba|nemotron_h|lfm2|mamba2")
@pytest.mark.parametrize("name", HYBRIDS)
def test_family(name: str, world: World) -> None:
    """The loss and all gradients of two ranks are those of one."""
    for found in world(error, name):
        assert isinstance(found, float), found
        assert found < 1e-12


@pytest.mark.table("(no labels|padded left)-(qwen3_next|mamba2)|padded left-(bamba|lfm2|nemotron_h)")
@pytest.mark.parametrize("name", [*EACH_KIND, "nemotron_h", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("inputs", ["no labels", "padded left", "padded right"])
def test_inputs(inputs: str, name: str, world: World) -> None:
    """Without labels, and with padding, which has no part in a state."""
    for found in world(error, name, inputs):
        assert isinstance(found, float), found
        assert found < 1e-12


UNEVEN = {"linear_num_value_heads": 6, "linear_num_key_heads": 3}
FEW_GROUPS = {"mamba_n_groups": 1}


@pytest.mark.table("qwen3_next-37-fields.*|lfm2-5-.*|bamba-.*")
@pytest.mark.parametrize(
    ("name", "tokens", "fields"),
    [
        ("qwen3_next", 37, {}),
        ("qwen3_next", 37, UNEVEN),
        ("bamba", 38, FEW_GROUPS),
        ("lfm2", 5, {"conv_L_cache": 4}),
        ("lfm3", 9, {}),
        ("nemotron_h", 39, {}),
        ("kimi_linear", 37, {}),
    ],
)
def test_four_ranks(name: str, tokens: int, fields: dict[str, Any], four_ranks: World) -> None:
    """Heads and groups that four ranks do not divide, and fewer tokens on a rank than a convolution looks back."""
    for found in four_ranks(error, name, "labels", 4, tokens, fields):
        assert isinstance(found, float), found
        assert found < 1e-12


@pytest.mark.table("(qwen3_next|lfm2)-attention|bamba-attention")
@pytest.mark.parametrize("keep", [None, "attention"])
@pytest.mark.parametrize("name", EACH_KIND)
def test_activation_checkpointing(name: str, keep: Any, four_ranks: World) -> None:
    """A recompute finds its region again, or what was kept, in two groups of two ranks."""
    policies = {"activation_checkpointing": ActivationCheckpointing(offload="cpu" if keep else None, keep=keep)}
    for found in four_ranks(error, name, "labels", 2, 37, {}, policies):
        assert isinstance(found, float), found
        assert found < 1e-12


def collectives(name: str, keep: Any) -> dict[str, int]:
    """The collectives of a checkpointed step without a self-check."""
    model, x = hybrid(name), ids(2, 37)
    policy, checkpointing = SequenceParallel(2, self_check=False), ActivationCheckpointing(keep=keep)
    with (
        lt_tiled.prepare(model, sequence_parallel=policy, activation_checkpointing=checkpointing, loss=True),
        Counts() as counts,
    ):
        model(input_ids=x, labels=x).loss.backward()
    return {name: counts.found[name] for name in ("all_to_all", "all_gather", "reduce_scatter", "group_mean")}


LAYERS = {"qwen3_next": (4, 1), "bamba": (4, 1), "lfm2": (2, 1), "mamba2": (4, 2)}
"""The all-to-alls of a forward pass of two layers, one of which is attention in most, and their convolutions."""


@pytest.mark.table("bamba-attention-2|lfm2-None-3")
@pytest.mark.parametrize(("keep", "times"), [(None, 3), ("attention", 2)])
@pytest.mark.parametrize("name", LAYERS)
def test_collectives(name: str, keep: str | None, times: int, world: World) -> None:
    """A layer with a state sends its inputs and its outputs, and gathers the last tokens for its convolution; each has
    a backward pass. A model without rotary positions gathers its hidden states in front of the loss.
    """
    exchanges, convolutions = LAYERS[name]
    blocks_alone = name == "mamba2"
    gathered = {"all_gather": 2 * convolutions + blocks_alone, "reduce_scatter": convolutions + blocks_alone}
    for found in world(collectives, name, keep):
        assert found == {"all_to_all": times * exchanges, **gathered, "group_mean": int(not blocks_alone)}


def kernel_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
    """A delta rule that keeps documents apart, as the kernel does."""
    ends, parts = kwargs.pop("cu_seqlens"), []
    ends = [0, query.shape[1]] if ends is None else ends.tolist()  # the self-check has no documents
    for low, high in pairwise(ends):
        parts.append(PLAIN["rule"](*(t[:, low:high] for t in (query, key, value, g, beta)), **kwargs)[0])
    return torch.cat(parts, 1), None


def kernel_convolution(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any) -> Tensor:
    """A convolution that keeps documents apart, as the kernel does."""
    documents, parts = kwargs.get("seq_idx"), []
    documents = x.new_zeros(1, x.shape[-1]) if documents is None else documents
    assert documents.shape == (1, x.shape[-1])
    for document in documents[0].unique():
        parts.append(PLAIN["convolution"](x[..., documents[0] == document], weight, bias, activation))
    return torch.cat(parts, -1)


PLAIN: dict[str, Any] = {}


def packed(inputs: str) -> float:
    """The error of a step on packed documents, where functions stand for the kernels that transformers would use."""
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    model, x = hybrid("qwen3_next"), ids(1, 37)
    reference, ends = copy.deepcopy(model), torch.tensor([0, 9, 21, 37], dtype=torch.int32)
    lengths = ends.diff().tolist()
    given = {**INPUTS[inputs](x), "use_cache": False, "cu_seq_lens_q": ends}
    given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    given["seq_idx"] = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    rule, convolution = file.torch_chunk_gated_delta_rule, file.causal_conv1d_fn
    PLAIN.update(rule=inspect.unwrap(rule), convolution=inspect.unwrap(convolution))
    file.torch_chunk_gated_delta_rule, file.causal_conv1d_fn = kernel_rule, kernel_convolution
    try:
        with wide(model):
            true = step(reference, given)
            with lt_tiled.prepare(model, sequence_parallel=2, activation_checkpointing=True):
                return worst(step(model, given), true)
    finally:
        file.torch_chunk_gated_delta_rule, file.causal_conv1d_fn = rule, convolution


@pytest.mark.parametrize("inputs", ["labels", "no labels"])
def test_packed_documents(inputs: str, world: World) -> None:
    """Documents that a step names to kernels are those of all tokens, and states and convolutions end with them."""
    for found in world(packed, inputs):
        assert found < (1e-6 if inputs == "labels" else 1e-12)  # the model's own loss rounds to float32


def with_a_kernel() -> str:
    """What a model says whose layer is replaced by a kernel."""
    model: Any = hybrid("qwen3_next")
    layer = model.model.layers[0].linear_attn
    layer.forward = MethodType(lambda self, hidden_states, **_: hidden_states.cumsum(1), layer)
    with pytest.raises(ValueError, match="has another") as raised, lt_tiled.prepare(model, sequence_parallel=2):
        model(**with_labels(ids(2, 37)))
    return str(raised.value)


def test_kernel_of_a_layer(world: World) -> None:
    """A layer whose functions are not called mixes the tokens of one rank, and is refused."""
    for message in world(with_a_kernel):
        assert re.search("model.layers.0 has another (output|gradient)", message)


def test_too_few_heads(four_ranks: World) -> None:
    """More ranks than heads of a state are refused with the size that is possible."""
    fields = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
    for message in four_ranks(error, "qwen3_next", "labels", 4, 37, fields):
        assert re.search(r"sequence_parallel=4 needs .* has 2: use sequence_parallel=2 or less", message)


@pytest.mark.table("minimax|deepseek_v4")
@pytest.mark.parametrize("name", ["mamba", "minimax", "deepseek_v4", "hy_v4"])
def test_other_layers(name: str, world: World) -> None:
    """Layers whose state has no heads, and attention to keys that something selects, are refused."""
    for message in world(error, name, "labels", 2, 300):
        assert re.search("has another (output|gradient)|cannot run on those|needs self-attention", str(message))


def test_position_bias(world: World) -> None:
    """Attention that adds a bias of positions is refused."""
    fields = {"n_routed_experts": 8, "moe_intermediate_size": 32}
    for message in world(error, "inkling_text", "no labels", 2, 37, fields):
        assert re.search("has another (output|gradient)|cannot run on those of one rank", str(message))


def restored() -> None:
    from transformers.models.bamba import modeling_bamba as file

    models, table = [hybrid("bamba"), hybrid("bamba")], vars(file)
    before, convolution = dict(table), table["causal_conv1d_fn"]
    first, second = (lt_tiled.prepare(model, sequence_parallel=2) for model in models)
    assert table["causal_conv1d_fn"] is not convolution
    x = ids(2, 37)
    for model in models:
        model(input_ids=x, labels=x).loss.backward()
    first.release()
    assert table["causal_conv1d_fn"] is not convolution
    second.release()
    assert dict(table) == before
    assert not any("lt_tiled" in name for module in models[0].modules() for name in vars(module))


def test_restored(world: World) -> None:
    """Two models of one file share its functions, which the last one to leave restores."""
    world(restored)
