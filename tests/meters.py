"""Exact measures on a CPU: FLOPs, and the peak of live bytes by the package's ledger and by torch's profiler."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lt_tiled.planner.ledger import Ledger as LiveBytes

__all__ = ["LiveBytes", "flops", "peak_bytes", "profiled_peak_bytes"]


def flops(run: Callable[[], Any]) -> int:
    """Floating point operations of the matrix products that ``run`` executes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes alive at once of the tensors that ``run`` makes."""
    with LiveBytes() as meter:
        run()
    return meter.peak


def profiled_peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of the bytes that torch's CPU allocator hands out while ``run`` works, by torch's profiler.

    States of the random numbers do not count: no operation makes them, so the ledger cannot see them. It runs on one
    thread and without oneDNN, because kernels have scratch memory that no tensor holds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            torch.backends.mkldnn.flags(enabled=False),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        ):
            run()
    finally:
        torch.set_num_threads(threads)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    random_state = torch.get_rng_state().nbytes
    return max(itertools.accumulate(change for change in changes if abs(change) != random_state))
