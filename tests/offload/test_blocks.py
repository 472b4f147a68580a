"""Models with offloaded block inputs: bit for bit the results of activation checkpointing, and flat memory."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lt_tiled import ActivationCheckpointing, OffloadDiskFullError, Prepared, Tiling, prepare
from lt_tiled.offload import offloader as offloading
from lt_tiled.policies import parse_bytes
from tests.meters import LiveBytes
from tests.models import Block, H, TinyLM, lm_loss, tiny_llama
from tests.offload.offloaders import fail, nth_call, unused, within_limit
from tests.parity import randn

IDS = torch.arange(2 * 24).view(2, 24) % 32
policy = ActivationCheckpointing

TIERS: list[dict[str, Any]] = [
    {"offload": "disk"},
    {"offload": "cpu"},
    {"offload": "cpu+disk", "cpu_budget": 4096},
    {"offload": "disk", "prefetch": 3, "keep_last": 0},
    {"offload": "disk", "keep_last": 5, "direct_io": False},
]


def packed_in(prepared: Prepared) -> list[tuple[str, tuple[int, ...]]]:
    """Return a list to which the block and the shape of each tensor are added that is offloaded from now on."""
    packed, real = [], prepared.offloader.pack
    prepared.offloader.pack = lambda t, block, kept=False: (
        packed.append((block, tuple(t.shape))) or real(t, block, kept)
    )
    return packed


def train(checkpointing: ActivationCheckpointing, device: str) -> tuple[list[float], list[Tensor], Prepared]:
    """Train six steps with accumulation over two micro-batches of different lengths, and a validation after three."""
    torch.manual_seed(0)
    model, long = TinyLM(5).to(device), IDS.to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    with sdpa_kernel(SDPBackend.MATH), prepare(model, activation_checkpointing=checkpointing, tiling=4) as prepared:
        for step in range(6):
            for ids in (long, long[:1, : 8 + step % 7]):
                loss = lm_loss(model(ids), ids)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                with torch.no_grad():
                    losses.append(lm_loss(model(long), long).item())
        if prepared.offloader is not None:
            gc.collect()
            assert not prepared.offloader.waiting()
            assert unused(prepared.offloader)
    return losses, [p.detach() for p in model.parameters()], prepared


@cache
def without(device: str) -> tuple[list[float], list[Tensor]]:
    return train(policy(), device)[:2]


@pytest.mark.table("cpu-.*|second-.*4096.*")
@pytest.mark.parametrize("fields", TIERS, ids=str)
def test_bit_identical(fields: dict[str, Any], device: str) -> None:
    """Over steps with accumulation and validation, on each device, each tier gives bit for bit the losses and weights
    without it.
    """
    losses, weights = without(device)
    offloaded, offloaded_weights, prepared = train(policy(**fields), device)
    assert offloaded == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, offloaded_weights, strict=True))
    if device == "cuda" and fields["offload"] == "cpu":
        assert all(piece.is_pinned() for pieces in prepared.offloader.cpu._free.values() for piece in pieces)
    stats = prepared.offloader.stats
    leaves = fields.get("keep_last") != 5  # of five blocks
    assert (stats.cpu_bytes + stats.disk_bytes > 0) == leaves
    assert (stats.disk_bytes > 0) == (leaves and "disk" in fields["offload"])


def test_hidden_states_alone_are_offloaded() -> None:
    """Of Llama layers with tiled MLPs the hidden states are offloaded; the mask and rotary tables, which the layers
    share, and what tiles save are not. Behind frozen embeddings it is the same.
    """
    model, ids = tiny_llama(num_hidden_layers=3), IDS[:, :16]
    with prepare(model, activation_checkpointing=policy(offload="disk", keep_last=0), tiling=Tiling(4)) as prepared:
        packed = packed_in(prepared)
        for trains in (True, False):
            model.get_input_embeddings().requires_grad_(trains)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert packed == [(f"model.layers.{i}", (2, 16, 32)) for i in range(3)] * 2
    assert prepared.offloader.stats.disk_bytes == 2 * 3 * 2 * 16 * 32 * 4


@pytest.mark.parametrize(
    "disguise", [lambda w: w, lambda w: w.t(), lambda w: w.detach(), lambda w: w.detach().t(), lambda w: w[2:]]
)
def test_a_weight_is_not_taken_for_an_activation(disguise: Any) -> None:
    """A weight, its transpose, its detached alias and a part of it stay where they are (torchtune), also as the first
    input of a block.
    """

    class UsesWeight(Block):
        def forward(self, weight: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + weight.mean())

    model, x = nn.ModuleList([UsesWeight(), UsesWeight()]), randn(1, 8, H) * 1
    model.shared = nn.Linear(H, H)
    with prepare(model, activation_checkpointing=policy(targets="UsesWeight", offload="disk")) as prepared:
        packed = packed_in(prepared)
        for block in (model[0], model[1]):
            x = block(disguise(model.shared.weight), x)
        x.sum().backward()
    assert all(shape == (1, 8, H) for _, shape in packed)


def test_memory_is_flat_in_the_number_of_blocks() -> None:
    """With disk offload, only kept, in-flight and prefetched block inputs are alive, for any number of blocks."""
    x = randn(1, 1024, H)

    def peak(count: int) -> int:
        model = nn.Sequential(*(Block() for _ in range(count)))
        checkpointing = policy(offload="disk", prefetch=1, targets=[str(i) for i in range(count)])
        with prepare(model, activation_checkpointing=checkpointing):
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)  # outside of what is measured
                with LiveBytes() as meter:
                    torch.autograd.backward(model(x), torch.ones(1, 1024, H))
                x.grad = None
        return meter.peak

    kept_in_flight_and_prefetched, one = 1 + 2 + 1, peak(1)
    for count in (8, 16):
        fingerprints = 5 * 4 * 1024 * count
        assert peak(count) - one <= kept_in_flight_and_prefetched * x.nbytes + fingerprints


def gradients_of_any_graphs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Gradients of a part of a graph, of a block that runs three times as shared layers do, and of graphs that are used
    twice, dropped or overlap in time.
    """
    inner = model[:2](x)
    out = model[2:](inner).square().sum()
    found = [*torch.autograd.grad(out, inner, retain_graph=True)]
    found += torch.autograd.grad(out, [x, model[0].mlp.up.weight])
    found += torch.autograd.grad(model[0](model[0](model[0](x))).square().sum(), x)
    dropped, first = model(x * 3), model(x).square().sum()
    second = model(x * 2).square().sum()
    del dropped
    for out in (first, first, second):
        found += torch.autograd.grad(out, x, retain_graph=True)
    return found


def test_graphs_of_any_use() -> None:
    """However graphs are used, their gradients are bit for bit those without offloading."""
    model, x = nn.Sequential(*(Block() for _ in range(4))), randn(1, 16, H)
    with prepare(model, activation_checkpointing=True):
        plain = gradients_of_any_graphs(model, x)
    with prepare(model, activation_checkpointing=policy(offload="disk", keep_last=0)):
        found = gradients_of_any_graphs(model, x)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("keep", [None, "attention"])
@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
@pytest.mark.parametrize(("kind", "fails_at"), [(ArithmeticError, 3), (ArithmeticError, 6), (KeyboardInterrupt, 6)])
def test_failed_steps_leave_nothing(
    keep: Any, offload: Any, kind: type[BaseException], fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step offloaded, or kept for its recompute, goes with its graph when the step ends in an exception, in the
    third of four blocks of the forward pass or in the backward pass: 11 failed steps hold what 3 do, in memory and in
    the file, and the next step is right.
    """
    monkeypatch.setattr(offloading, "MIN_BYTES", 1024)  # some of what is kept is smaller and stays on the device
    torch.manual_seed(0)
    model, calls, held = tiny_llama(num_hidden_layers=4), itertools.count(1), []

    def step() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    def stumble(*_: object) -> None:
        if next(calls) % fails_at == 0:
            raise kind("stumbled")

    with prepare(model, activation_checkpointing=True):
        plain = step()
    checkpointing = policy(offload=offload, keep=keep, keep_last=0 if offload else 1)
    with prepare(model, activation_checkpointing=checkpointing) as prepared:
        handles = [layer.self_attn.register_forward_pre_hook(stumble) for layer in model.model.layers]
        with LiveBytes() as meter:
            for _ in range(11):
                with pytest.raises(kind, match="stumbled"):
                    step()
                gc.collect()
                held.append(meter.now)
                assert prepared.offloader is None or (unused(prepared.offloader) and not prepared.offloader.waiting())
            # A write that had begun holds its bytes until it ends. The last fingerprints take less than a step leaves.
            assert within_limit(lambda: meter.now <= held[2] + 2**13)
        for handle in handles:
            handle.remove()
        assert all(torch.equal(a, b) for a, b in zip(step(), plain, strict=True))


def test_full_disk_before_training(tmp_path: Path) -> None:
    """A disk without room for the budget raises when the model is prepared. The model stays as it was, and nothing is
    left open.
    """
    model, before = TinyLM(), os.listdir("/proc/self/fd")
    message = r"cannot create a file of at least 1\.00 GiB in .*: No space left"
    checkpointing = policy(offload="disk", disk_budget="1GiB", directory=str(tmp_path))
    with nth_call("posix_fallocate", 1, fail(errno.ENOSPC)), pytest.raises(OffloadDiskFullError, match=message):
        prepare(model, activation_checkpointing=checkpointing)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert os.listdir("/proc/self/fd") == before
    assert list(tmp_path.iterdir()) == []


def test_release_gives_disk_and_descriptors_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the release no file, no descriptor and no thread of the offloader is left. ``~`` is the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        model = TinyLM(3)
        with prepare(model, activation_checkpointing=policy(offload="disk", directory="~")) as prepared:
            assert prepared.offloader.disk.directory == str(tmp_path)
            lm_loss(model(IDS), IDS).backward()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


BAD: list[tuple[dict[str, Any], str]] = [
    ({"offload": "nvme"}, "offload='nvme' must be one of None, 'cpu', 'disk', 'cpu\\+disk'"),
    ({"cpu_budget": "1GiB"}, "has no effect with offload=None: set offload='cpu' or 'cpu\\+disk'"),
    ({"offload": "cpu", "directory": "/x"}, "directory='/x' has no effect with offload='cpu'"),
    ({"offload": "cpu", "cpu_budget": "much"}, "cpu_budget='much' is not a number of bytes"),
    ({"offload": "disk", "disk_budget": 0}, "disk_budget=0 must be at least one byte"),
    ({"prefetch": 0}, "prefetch=0 must be an integer of at least 1"),
    ({"keep_last": -1}, "keep_last=-1 must be an integer of at least 0"),
]


def test_fields() -> None:
    """Values out of bounds, and settings of a tier that is not used, raise when the policy is created. Budgets are
    numbers of bytes, or texts with binary or decimal units.
    """
    for fields, message in BAD:
        with pytest.raises(ValueError, match=message):
            policy(**fields)
    texts = {"32GiB": 32 * 2**30, "500 GB": 5 * 10**11, "1.5kib": 1536, 7: 7, "12b": 12, "3M": 3 * 10**6}
    assert {text: parse_bytes(text, "cpu_budget") for text in texts} == texts
