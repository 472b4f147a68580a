"""Exact measures on a CPU: FLOPs, and the peak of live bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lt_tiled.planner.ledger import Ledger as LiveBytes

__all__ = ["LiveBytes", "flops", "peak_bytes"]


def flops(run: Callable[[], Any]) -> int:
    """Floating point operations, by torch's formulas, of the matrix products and of attention that ``run`` executes."""
    with LiveBytes() as meter:
        run()
    return meter.work.total()


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes alive at once of the tensors that ``run`` makes."""
    with LiveBytes() as meter:
        run()
    return meter.peak
