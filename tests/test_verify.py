"""``lt_tiled.verify`` and ``lt-tiled verify``: what passes, what fails, and what is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from lt_tiled import TiledSingleDeviceStrategy, Tiling, Verification, verify
from lt_tiled.cli import main
from lt_tiled.tiling.autograd import TiledFunction
from tests.architectures import ARCHITECTURES
from tests.engines.cells import draw, strategy
from tests.models import GatedMLP, H, TinyLM, lm_loss
from tests.test_cli import QUICKSTART

_true_backward = TiledFunction.backward


def too_large(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """A backward pass with a gradient that is 1 % too large."""
    return tuple(None if g is None else g * 1.01 for g in _true_backward(ctx, *gradients))


def step(model: Any, ids: Tensor) -> Tensor:
    return lm_loss(model(ids), ids)


def on_engine(engine: str, wrong_rank: int | None = None, **policies: Any) -> tuple[Verification, float]:
    """The result on a rank, of sequences of its own; and the largest difference of what the user's model was before."""
    net = TinyLM()
    before = [p.detach().clone() for p in net.parameters()]
    chosen = strategy(lt_tiled, engine, **policies)
    if dist.get_rank() == wrong_rank:
        TiledFunction.backward = staticmethod(too_large)
    try:
        ids = draw((2, 24 + 6 * dist.get_rank()), dist.get_rank())
        result = verify(net, ids, step=step, strategy=chosen, devices=dist.get_world_size())
    finally:
        TiledFunction.backward = staticmethod(_true_backward)
    return result, max(float((p - b).abs().max()) for p, b in zip(net.parameters(), before, strict=True))


ENG = ["ddp", "fsdp", "fsdp_flat", "fsdp2"]
@pytest.mark.parametrize("engine", [*ENG, "zero1", "zero2", "zero3"])
def test_engines(engine: str, request) -> None:
    world = request.getfixturevalue("deepspeed_world" if engine.startswith("zero") else "world")
    print(engine)
    for result, changed in world(on_engine, engine):
        print(result)
    assert result.passed, result.verdict
    for result, changed in world(on_engine, engine, 1):
        print(result.verdict)
        assert not result.passed
