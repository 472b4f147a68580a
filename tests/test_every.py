"""Every n-th block is recomputed, and the others keep their activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lt_tiled import ActivationCheckpointing, prepare
from lt_tiled.checkpointing import BlockPatch
from lt_tiled.modules.patch import get_patch
from tests.meters import LiveBytes, flops
from tests.models import Block, H, TinyLM, lm_loss, tiny_llama
from tests.parity import gradients, randn, step_of

IDS = torch.arange(2 * 24).view(2, 24) % 32


def recomputed(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if get_patch(module, BlockPatch) is not None]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_flops_and_live_bytes(every: int) -> None:
    """Of six blocks, every n-th costs its recompute and frees its activations, and the others do neither."""
    model, x = nn.Sequential(*(Block() for _ in range(6))), randn(1, 256, H)

    def measure(every: int | None) -> tuple[int, int]:
        policy = False if every is None else ActivationCheckpointing(every=every)
        with prepare(model, activation_checkpointing=policy):
            work = flops(lambda: model(x).sum().backward())
            with LiveBytes() as meter:
                output = model(x)
                held = meter.now
            assert output.requires_grad
        return work, held

    (none, most), (all_of_them, least), (work, held) = measure(None), measure(1), measure(every)
    assert all_of_them > none
    assert (work - none) * every == all_of_them - none
    of_inputs = 6 * 2048  # what checkpoint keeps of each block: a few numbers
    assert abs((most - held) * every - (most - least)) < of_inputs
    assert most - least > 6 * 10 * x.nbytes


@pytest.mark.parametrize(
    "more", [{}, {"offload": "cpu", "min_bytes": 0, "keep_last": 0}, {"keep": "attention"}], ids=str
)
@pytest.mark.parametrize("every", [2, 3])
def test_same_gradients(every: int, more: dict[str, Any]) -> None:
    """Loss and gradients are bit for bit those without activation checkpointing, also with tiles, offload and keep."""
    model = TinyLM(5)

    def step() -> dict[str, torch.Tensor]:
        return gradients(model, IDS, loss=lambda logits: lm_loss(logits, IDS))

    with prepare(model, tiling=3):
        true = step()
    with prepare(model, tiling=3, activation_checkpointing=ActivationCheckpointing(every=every, **more)) as prepared:
        found = step()
        assert recomputed(model) == [f"blocks.{place}" for place in range(0, 5, every)]
    assert found.keys() == true.keys()
    assert all(torch.equal(found[name], true[name]) for name in true)
    if prepared.offloader is not None:
        assert prepared.offloader.stats.cpu_bytes > 0


def test_transformers() -> None:
    """A model of transformers, which makes a key-value cache, has the same gradients bit for bit."""
    model = tiny_llama(num_hidden_layers=4)
    batch = {"input_ids": IDS, "labels": IDS}
    true = step_of(model, batch)
    with prepare(model, activation_checkpointing=ActivationCheckpointing(every=2)):
        found = step_of(model, batch)
        assert recomputed(model) == ["model.layers.0", "model.layers.2"]
    assert all(torch.equal(found[name], true[name]) for name in true)


def test_each_class_counts_for_itself() -> None:
    """Where classes of blocks alternate, every n-th of each is recomputed."""

    class Other(Block):
        pass

    model = nn.Sequential(*(cls() for _ in range(3) for cls in (Block, Other)))
    with prepare(model, activation_checkpointing=ActivationCheckpointing(every=2)):
        assert recomputed(model) == ["0", "1", "4", "5"]


def test_bad_values() -> None:
    """Bad values are errors with the bound and the remedy, before the model is changed."""
    with pytest.raises(ValueError, match="every=0 must be an integer of at least 1"):
        ActivationCheckpointing(every=0)
    with pytest.raises(ValueError, match=r"every=2 is for a recompute.*activations='all'.*leave one out"):
        ActivationCheckpointing(every=2, activations="all", offload="cpu")
    model = TinyLM(2)
    with pytest.raises(ValueError, match="every=3 is more than the 2 blocks of a class: set every=2 or less"):
        prepare(model, activation_checkpointing=ActivationCheckpointing(every=3))
    assert recomputed(model) == []
