"""``torch.compile`` of a model, its blocks or its loss, together with what lt_tiled does."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook

import lt_tiled
from lt_tiled import ActivationCheckpointing, Tiling, prepare, tiled_linear_cross_entropy
from tests.models import tiny_llama
from tests.parity import errors

pytestmark = pytest.mark.slow
ROOT = str(Path(lt_tiled.__file__).parent)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled_code() -> Iterator[Counter[tuple[str, str]]]:
    """The files and functions of which the compiler made code, and how often."""
    found: Counter[tuple[str, str]] = Counter()

    def note(code: Any, _: Any) -> None:
        found[code.co_filename, code.co_name] += 1

    handle = register_bytecode_hook(note)
    yield found
    handle.remove()


def blocks_of(model: Any) -> nn.ModuleList:
    return getattr(model, "_orig_mod", model).model.layers


def compile_blocks(model: nn.Module, backend: str) -> nn.Module:
    for block in blocks_of(model):
        block.compile(backend=backend)
    return model


OFFLOAD: dict[str, Any] = {"offload": "cpu", "keep_last": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "tiles": {"tiling": Tiling(num_shards=4), "activation_checkpointing": False},
    "offload": {"tiling": Tiling(num_shards=4), "activation_checkpointing": ActivationCheckpointing(**OFFLOAD)},
    "keep attention": {"activation_checkpointing": ActivationCheckpointing(keep="attention")},
    "all": {"tiling": Tiling(num_shards=4), "activation_checkpointing": True, "loss": True},
}


def differentiated(forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    loss = forward(ids)
    loss.backward()
    return loss.detach()


def steps(model: Any, lengths: tuple[int, ...], step: Any = None) -> Iterator[dict[str, Tensor]]:
    """The loss and the gradients of a step of each length, under the names of the model that is not compiled."""
    step = step or partial(differentiated, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for length in lengths:
        ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))
        loss = step(ids)
        gradients = {n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
        yield {"loss": loss, **gradients}
        optimizer.step()
        optimizer.zero_grad()


def check(model: Any, plain: nn.Module, compiled_code: Counter[tuple[str, str]], step: Any = None) -> None:
    """Compare six steps with those of the plain model, whose later lengths make no code, and lt_tiled's never do."""
    lengths = (64, 48, 33, 80, 64, 96)
    model.train()
    for place, (found, expected) in enumerate(zip(steps(model, lengths, step), steps(plain, lengths), strict=True)):
        assert max(errors(found, expected).values()) < 1e-5
        if place == 1:
            before = compiled_code.total()
    assert before == compiled_code.total() > 0
    ours = {name for file, name in compiled_code if file.startswith(ROOT)}
    assert ours <= {"method"}  # which breaks the graph at patches


@pytest.mark.table("aot_eager-(keep attention|all)")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks(name: str, backend: str, compiled_code: Counter[tuple[str, str]]) -> None:
    """Compiled blocks, whether they are compiled before or after they are prepared, have the losses and gradients of
    the plain model with each setting. The compiler makes code in the first two lengths and none after them, and none of
    what lt_tiled does around the blocks.
    """
    torch.manual_seed(0)
    model = tiny_llama()
    plain = copy.deepcopy(model)
    if name == "offload":
        compile_blocks(model, backend)
    with prepare(model, **SETTINGS[name]):
        if name != "offload":
            compile_blocks(model, backend)
        check(model, plain, compiled_code)


def test_a_policy_runs_blocks_uncompiled(compiled_code: Counter[tuple[str, str]]) -> None:
    """With a list of operators the compiler makes no code of blocks, which are as the plain ones."""
    torch.manual_seed(0)
    model, lengths = tiny_llama(), (64, 64, 64)
    plain = copy.deepcopy(model)
    policy = ActivationCheckpointing(keep=["aten.mm.default"])
    with prepare(model, tiling=Tiling(num_shards=4), activation_checkpointing=policy):
        compile_blocks(model, "aot_eager")
        for found, expected in zip(steps(model, lengths), steps(plain, lengths), strict=True):
            assert max(errors(found, expected).values()) < 1e-5
    assert {name for _, name in compiled_code} == {"method"}


def test_blocks_share_code(compiled_code: Counter[tuple[str, str]]) -> None:
    """Any number of blocks, each compiled by a call of its own, runs the same code."""
    made = []
    for layers in (2, 10):
        model = tiny_llama(num_hidden_layers=layers)
        with prepare(model, tiling=Tiling(num_shards=4), activation_checkpointing=True):
            list(steps(compile_blocks(model, "aot_eager"), (64, 48)))
        made.append(compiled_code.copy())
        compiled_code.clear()
        torch._dynamo.reset()
    assert made[0] == made[1]


def test_a_graph_without_breaks_is_refused() -> None:
    """``fullgraph=True`` raises with the page that says what breaks the graph."""
    model = tiny_llama()
    with prepare(model, activation_checkpointing=True), pytest.raises(RuntimeError, match=r"docs/models\.md"):
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=torch.zeros(1, 8, dtype=torch.long))


def compiled_step(model: Any, backend: str) -> Callable[[Tensor], Tensor]:
    """A training step compiled with its backward pass, at which torch breaks the graph."""
    step = partial(differentiated, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
    return torch.compile(step, backend=backend)


def compiled_loss(model: Any, backend: str) -> Callable[[Tensor], Tensor]:
    """A training step with lt_tiled's loss in a function that is compiled."""

    def loss(hidden: Tensor, ids: Tensor) -> Tensor:
        return tiled_linear_cross_entropy(hidden * 1.0, model.lm_head.weight, ids, shift=True)

    compiled = torch.compile(loss, backend=backend)
    return partial(differentiated, lambda ids: compiled(model.model(input_ids=ids, use_cache=False)[0], ids))


@pytest.mark.table("compiled_loss-.*")
@pytest.mark.parametrize(
    ("what", "name", "backend"),
    [
        (compiled_step, "tiles", "eager"),
        (compiled_step, "offload", "eager"),
        (compiled_step, "keep attention", "eager"),
        (compiled_step, "all", "inductor"),
        (compiled_loss, "all", "aot_eager"),
    ],
)
def test_compiled_functions(what: Any, name: str, backend: str, compiled_code: Counter[tuple[str, str]]) -> None:
    """A training step or a loss that is compiled around a prepared model has the losses and gradients of the plain
    model, and the compiler makes no code of lt_tiled's, not even in the backward pass.
    """
    torch.manual_seed(0)
    model = tiny_llama()
    plain = copy.deepcopy(model)
    with prepare(model, **SETTINGS[name]):
        check(model, plain, compiled_code, what(model, backend))
