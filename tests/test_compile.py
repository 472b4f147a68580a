"""``torch.compile`` of a model or its blocks, and of tiles: the losses and gradients are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import Tiling, prepare
from tests.models import tiny_llama
from tests.parity import errors

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Any, compiled: Any, length: int) -> dict[str, Tensor]:
    """The loss and the gradients of a step, under the names of the model that is not compiled."""
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, weight in model.named_parameters():
        found[name] = weight.grad
        weight.grad = None
    return found


def compile_model(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def compile_blocks(model: Any) -> Any:
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("tiles", [False, {"backend": "aot_eager"}], ids=["plain tiles", "compiled tiles"])
@pytest.mark.parametrize("compiled", [compile_model, compile_blocks])
def test_compiled(compiled: Any, tiles: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled before or after it is prepared, with plain or compiled tiles, and with sequences of any length. One line
    says that patched modules run uncompiled, and ``fullgraph=True`` is refused.
    """
    caplog.set_level("INFO")
    torch.manual_seed(0)
    model: nn.Module = tiny_llama().train()
    plain = copy.deepcopy(model)
    call = compiled(model) if tiles else None
    with prepare(model, tiling=Tiling(num_shards=4, compile=tiles), activation_checkpointing=True, loss=True):
        call = compiled(model) if call is None else call
        for length in (64, 48, 33):
            assert max(errors(step(model, call, length), step(plain, plain, length)).values()) < 1e-5
        with pytest.raises(RuntimeError, match=r"docs/models\.md"):
            torch.compile(model, fullgraph=True, backend="eager")(input_ids=torch.zeros(1, 8, dtype=torch.long))
    assert caplog.text.count("uncompiled") == 1
