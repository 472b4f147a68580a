"""Architectures of transformers: what ``auto`` finds in each, parity with the untiled model, and memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lt_tiled import Tiling, prepare
from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.targets import find_tileable
from lt_tiled.report import pattern
from tests.architectures import ARCHITECTURES, Architecture
from tests.meters import LiveBytes
from tests.parity import step_of, worst_of_model

pytestmark = [pytest.mark.slow, pytest.mark.self_checks]

TILES = Tiling(num_shards=3)
"""Three tiles of most inputs are not of one size."""


def run(model: nn.Module, architecture: Architecture) -> dict[str, torch.Tensor]:
    """The loss, and every gradient by its weight's name."""
    return step_of(model, architecture.feed(model))


WITH_MLP = [name for name, architecture in ARCHITECTURES.items() if architecture.finds]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WITH_MLP])
def test_no_mlp(name: str) -> None:
    """Where a block's own code holds the halves of its MLP, ``auto`` says so before anything changes."""
    model = ARCHITECTURES[name].build()
    before = [set(vars(m)) for m in model.modules()]
    with pytest.raises(NothingFoundError, match=rf"Tiling found no MLP in {type(model).__name__}.*tiling=False"):
        prepare(model, tiling=TILES, activation_checkpointing=True)
    assert [set(vars(m)) for m in model.modules()] == before


@pytest.mark.table(  # one architecture of each kind of structure
    "Llama|GPT-2|Gemma 2|BERT|T5|Mixtral|GPT-OSS|Jamba|Swin|DINOv2 with registers|wav2vec 2.0|ALBERT"
)
@pytest.mark.parametrize("name", WITH_MLP)
def test_tiled(name: str) -> None:
    """What the docs name is tiled. With activation checkpointing, the loss and all gradients of the tiled model are the
    untiled ones, its FLOPs too unless the entry says why not, and the peak of live bytes of a step is lower.
    """
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    true = run(model, architecture)
    expected = {pattern(mlp.path) for mlp in find_tileable(model, Tiling(targets="mlp"))}
    with prepare(model, activation_checkpointing=True):
        untiled = costs(model, architecture)
    with prepare(model, tiling=TILES, activation_checkpointing=True) as prepared:
        assert {pattern(row.path) for row in prepared.report().tiled} == expected
        flops = costs(model, architecture)[0]  # of the first step
        assert all(row.tiles > 1 for row in prepared.report().tiled)
        assert worst_of_model(run(model, architecture), true) <= architecture.error
        again, peak = costs(model, architecture)
    assert again == flops
    assert peak < untiled[1]
    if architecture.more_flops:  # at most one of the four times that an MLP with activation checkpointing is computed
        assert untiled[0] < flops <= 1.25 * untiled[0]
    else:
        assert flops == untiled[0]


def costs(model: nn.Module, architecture: Architecture) -> tuple[int, int]:
    """FLOPs by torch's formulas and the peak of live bytes, of one step."""
    with LiveBytes() as live:
        run(model, architecture)
    return live.work.total(), live.peak
