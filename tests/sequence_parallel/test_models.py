"""Every architecture of the table shares its sequences as one process computes them, or is refused with a remedy."""

from __future__ import annotations

import copy

import lt_tiled
from lt_tiled.errors import NothingFoundError
from tests.architectures import ARCHITECTURES
from tests.sequence_parallel.runs import step, worst
from tests.world import World


def shared(name: str) -> tuple[float, str]:
    """The error of an architecture whose sequences are shared by all ranks, or why it is refused."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    inputs = architecture.feed(model)
    reference = copy.deepcopy(model)
    losses = {"loss": True}
    try:
        lt_tiled.prepare(reference, **losses)
    except NothingFoundError:
        losses = {}
    true = step(reference, inputs)
    try:
        with lt_tiled.prepare(model, sequence_parallel=2, **losses):
            return worst(step(model, inputs), true), ""
    except ValueError as error:
        return 0.0, str(error)
