"""Live bytes of shared sequences, and of attention that is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lt_tiled
from lt_tiled import ActivationCheckpointing
from tests.meters import LiveBytes
from tests.sequence_parallel.models import HeadsOnly
from tests.sequence_parallel.runs import peaks
from tests.world import World


@pytest.mark.full
def test_a_quarter_of_the_tokens(four_ranks: World) -> None:
    """A rank of four that share a sequence has the peak of one rank with a quarter of the tokens."""
    policies = {"activation_checkpointing": True, "tiling": True, "loss": True}
    for shared, alone in four_ranks(peaks, 2048, policies):
        assert shared <= 1.05 * alone


def left_after_forward(keep: Any) -> int:
    """The bytes alive after the forward pass of two blocks with activation checkpointing, in float32."""
    model, x = HeadsOnly(64, 16), torch.randn(1, 256, 64, requires_grad=True)
    policy = ActivationCheckpointing(keep=keep)
    with lt_tiled.prepare(model, activation_checkpointing=policy), LiveBytes() as meter:
        output = model(x)
        left = meter.now
        del output
    return left


def test_kept() -> None:
    """Each block keeps attention's output and its log-sum-exp."""
    kept = 2 * (256 * 64 * 4 + 16 * 256 * 4)
    assert left_after_forward("attention") - left_after_forward(None) == pytest.approx(kept, rel=0.002)  # samples aside
