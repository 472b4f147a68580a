"""Live bytes of shared sequences, and of attention that is kept."""

from __future__ import annotations

import pytest

from tests.sequence_parallel.runs import peaks
from tests.world import World


@pytest.mark.full
def test_a_quarter_of_the_tokens(four_ranks: World) -> None:
    """A rank of four that share a sequence has the peak of one rank with a quarter of the tokens."""
    policies = {"activation_checkpointing": True, "tiling": True, "loss": True}
    for shared, alone in four_ranks(peaks, 2048, policies):
        assert shared <= 1.05 * alone
