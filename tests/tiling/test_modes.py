"""Modes of torch under which tiles run, on each device: compilers, gradient scaling, TF32, deterministic algorithms."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile
from tests.models import GatedMLP, tiny_llama
from tests.parity import SPREADS, gradients, less_accurate, randn, reference, spread_of, worst
from tests.tiling.test_compiled import compiled

ON_GPU = pytest.mark.gpu
COMPILERS = [
    ("cpu", {"backend": "aot_eager"}),
    pytest.param("cuda", True, marks=ON_GPU),
    pytest.param("cuda", {"mode": "reduce-overhead"}, marks=ON_GPU),
]


@contextmanager
def tiled(model: nn.Module) -> Iterator[nn.Module]:
    """A model with all features, in tiles of a few tokens."""
    offloaded = ActivationCheckpointing(offload="cpu", min_bytes=0, keep_last=0)
    with prepare(model, tiling=Tiling(tile_tokens=16), activation_checkpointing=offloaded, loss=3):
        yield model


@pytest.mark.slow
@pytest.mark.parametrize(("device", "compile"), COMPILERS, indirect=["device"])
def test_compiled(device: str, compile: Any) -> None:
    """Compiled tiles, as CUDA graphs too, have the gradients of the untiled module in each of several steps."""
    torch._dynamo.reset()
    module, x = GatedMLP(64, 192), randn(1, 100, 64)
    true = reference(module, x)
    module = tile(module.to(device), tile_tokens=32, compile=compile)
    assert all(worst(gradients(module, x, device=device), true) < 1e-5 for _ in range(4))
    assert compiled(module)


def scaled(model: nn.Module, device: str) -> tuple[list[float], float]:
    """Take four steps, of which the first overflows, and return their losses and the last scale."""
    ids, losses = torch.arange(50, device=device)[None] % 64, []
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        with torch.autocast(device, dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, scaler.get_scale()


@pytest.mark.low_precision
def test_gradient_scaler(device: str) -> None:
    """With float16 autocast and a ``GradScaler``, a step whose gradients overflow is skipped, and the losses are those
    of the untiled model.
    """
    torch.manual_seed(0)
    model = tiny_llama().to(device)
    untiled, scale = scaled(copy.deepcopy(model), device)
    with tiled(model):
        losses, tiled_scale = scaled(model, device)
    assert scale == tiled_scale == 2.0**10
    assert losses[0] == losses[1] > losses[2] > losses[3]
    spread = spread_of(lambda: scaled(copy.deepcopy(model).to("cpu"), "cpu")[0])
    assert losses == pytest.approx(untiled, rel=SPREADS * spread)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)], indirect=True)
def test_tf32(device: str) -> None:
    """With TF32 products the error of the tiles is that of the untiled module."""
    module, x = GatedMLP(64, 192), randn(1, 96, 64)
    true = reference(module, x)
    torch.set_float32_matmul_precision("high")
    try:
        untiled = gradients(module, x, device=device)
        tiled = gradients(tile(module, num_shards=4), x, device=device)
        assert less_accurate(tiled, untiled, true, eps=2**-10 if device == "cuda" else 0.0) == {}
    finally:
        torch.set_float32_matmul_precision("highest")


def test_deterministic(device: str) -> None:
    """Under ``torch.use_deterministic_algorithms``, which fills new memory with NaN, nothing raises, and two runs have
    the same loss and gradients bit for bit.
    """
    ids = torch.arange(100, device=device).view(2, 50) % 64
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    try:
        with tiled(tiny_llama().to(device)) as model, sdpa_kernel(SDPBackend.MATH):
            found = []
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                found.append([loss.detach(), *(p.grad for p in model.parameters())])
                model.zero_grad(set_to_none=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))
