"""Flex attention of transformers and kernels of layers get all tokens of some heads, and are restored."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mha

import lt_tiled
from tests.parity import EXACT
from tests.sequence_parallel.cases import WINDOW, Case, encoder, labeled, no_labels, packed, padded
from tests.sequence_parallel.hybrids import causal
from tests.sequence_parallel.models import ids
from tests.sequence_parallel.runs import shared
from tests.world import World

FLEX: dict[str, tuple[str, dict[str, Any], Any]] = {
    "packed": ("llama", {}, packed),
    "padded": ("llama", {}, padded(True)),
    "window": ("mistral", WINDOW, padded(False)),
}


def error_of_flex(name: str) -> float:
    """The error of a loss without gradients, which torch's flex attention has not on a CPU."""
    architecture, fields, given = FLEX[name]
    model, losses = causal(architecture, **fields)().train(), []
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        for policies in ({}, {"sequence_parallel": 4}):
            with lt_tiled.prepare(model, loss=True, **policies):
                losses.append(model(**given(ids(2, 37))).loss)
    return float((losses[1] - losses[0]).abs() / losses[0])


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name: str, four_ranks: World) -> None:
    """Flex attention of transformers gets block masks of all tokens."""
    for error in four_ranks(error_of_flex, name):
        assert error < EXACT


@contextmanager
def kernels() -> Iterator[None]:
    """Let functions that keep documents apart stand for the kernels that transformers would use."""
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    before = [getattr(file, name) for name in names]
    plain_rule, plain_convolution = (inspect.unwrap(function) for function in before)

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        ends, parts = kwargs.pop("cu_seqlens"), []
        ends = [0, query.shape[1]] if ends is None else ends.tolist()  # the self-check has no documents
        for low, high in pairwise(ends):
            parts.append(plain_rule(*(t[:, low:high] for t in (query, key, value, g, beta)), **kwargs)[0])
        return torch.cat(parts, 1), None

    def convolution(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any) -> Tensor:
        documents, parts = kwargs.get("seq_idx"), []
        documents = x.new_zeros(1, x.shape[-1]) if documents is None else documents
        assert documents.shape == (1, x.shape[-1])
        for document in documents[0].unique():
            parts.append(plain_convolution(x[..., documents[0] == document], weight, bias, activation))
        return torch.cat(parts, -1)

    for name, function in zip(names, (rule, convolution), strict=True):
        setattr(file, name, function)
    try:
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(file, name, function)


def documents(x: Tensor) -> dict[str, Any]:
    """Three documents in one row, named to kernels, too."""
    ends = torch.tensor([0, 9, 21, x.shape[1]], dtype=torch.int32)
    lengths = ends.diff().tolist()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    seq_idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    return no_labels(x) | {"position_ids": positions, "cu_seq_lens_q": ends, "seq_idx": seq_idx}


def shared_documents(labels: bool) -> tuple[float, int, str]:
    case = Case(causal("qwen3_next"), lambda x: documents(x) | ({"labels": x} if labels else {}), rows=1)
    with kernels():
        return shared(case, 2, {"activation_checkpointing": True})


@pytest.mark.parametrize("labels", [True, False])
def test_documents_of_kernels(labels: bool, world: World) -> None:
    """Documents that a step names to kernels are those of all tokens, and states and convolutions end with them."""
    for error, exchanges, refused in world(shared_documents, labels):
        assert refused == ""
        assert exchanges
        assert error < EXACT


def evaluated() -> float:
    """The error of layers that torch computes in one kernel in evaluation, and undo what lets them call attention."""
    model, x, before = encoder().eval(), ids(2, 37), (F.scaled_dot_product_attention, mha.get_fastpath_enabled)
    with torch.no_grad():
        plain = model(x)
        with lt_tiled.prepare(model, sequence_parallel=2):
            found = model(x)
    assert (F.scaled_dot_product_attention, mha.get_fastpath_enabled) == before
    return float((found - plain).abs().max())


def test_evaluation_of_torch(world: World) -> None:
    """``nn.TransformerEncoderLayer`` attends to all tokens in evaluation, too."""
    for error in world(evaluated):
        assert error < EXACT


def restored() -> None:
    """Release two models of one file in turn."""
    from transformers.models.bamba import modeling_bamba as file

    models, table = [causal("bamba")(), causal("bamba")()], vars(file)
    before, convolution = dict(table), table["causal_conv1d_fn"]
    first, second = (lt_tiled.prepare(model, sequence_parallel=2) for model in models)
    assert table["causal_conv1d_fn"] is not convolution
    for model in models:
        model(**labeled(ids(2, 37))).loss.backward()
    first.release()
    assert table["causal_conv1d_fn"] is not convolution
    second.release()
    assert dict(table) == before
    assert not any("lt_tiled" in name for module in models[0].modules() for name in vars(module))


def test_restored(world: World) -> None:
    """Two models of one file share its functions, which the last one to leave restores."""
    world(restored)


def generated() -> bool:
    model: Any = causal("llama")().eval()
    x, found = ids(2, 13, seed=dist.get_rank()), []
    for policies in ({}, {"sequence_parallel": 2}):
        with lt_tiled.prepare(model, **policies):
            found.append(model.generate(x, max_new_tokens=4, do_sample=False))
    return torch.equal(*found)


def test_generation(world: World) -> None:
    """Calls that fill a cache run whole, so that each rank may generate from its own prompt."""
    assert world(generated) == [True, True]
