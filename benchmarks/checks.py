"""What the checks cost: ``python -m benchmarks --only checks``.

The seconds that a training step spends in the self-check (in the first step, and where a call runs in another mode) and
in comparing what the recompute reads and computes with what the forward pass read and computed (in every step).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from benchmarks.costs import Size, llama, with_checkpointing
from benchmarks.sheet import Cell, Sheet, machine
from benchmarks.step_time import HERE, ON_GPU, QUICK, step_of
from lt_tiled.determinism import BlockSamples
from lt_tiled.tiling import call, observe, patched, tiled_call
from lt_tiled.tiling.observe import Observation
from lt_tiled.tiling.places import Place
from lt_tiled.tiling.tiled_call import TiledCall
from lt_tiled.tiling.weights import Work

_EVERY_STEP = [
    (Observation, "__init__"),
    (Observation, "end_forward"),
    (Observation, "check"),
    (Observation, "_restore"),
    (observe, "changed"),
    (Place, "restore"),
    (BlockSamples, "sample"),
    (TiledCall, "compare"),
    (tiled_call, "samples_of"),
    (Work, "hooked"),
    (Work, "recorded"),
    (call, "_switches"),
]
CHECKS: dict[str, list[tuple[Any, str]]] = {
    "self-check": [(patched, "check_position_wise")],
    "every step": _EVERY_STEP,
}
"""The functions that check."""
BOUND = 0.01
"""Of a later step."""


def checks(device: torch.device, rounds: int = 9, quick: bool = False) -> list[Sheet]:
    """One row for the first step, and one for the median of the later ones."""
    size, dtype = (ON_GPU, torch.bfloat16) if device.type == "cuda" else (QUICK if quick else HERE, torch.float32)
    found = measured(device, size, dtype, rounds)
    sheet = Sheet("checks", "the checks of a training step", ["", "step [s]", "self-check", "every step's checks"])
    sheet.notes = [
        f"Llama with activation checkpointing, {size.layers} layers of {size.hidden}, {size.tokens} tokens,"
        f" {str(dtype)[6:]}, {machine(device)}; ✓ below {BOUND:.0%} of a later step."
    ]
    for name, (step, first, every) in found.items():
        share = every / step
        cell = Cell(f"{share:.2%}", share < BOUND) if name == "later" else f"{share:.2%}"
        sheet.add(name, f"{step:.3f}", f"{first / step:.2%}", cell)
    return [sheet]


def measured(device: torch.device, size: Size, dtype: torch.dtype, rounds: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of the first step and of the median of the others: of the step, and in each kind of check."""
    model, ids = llama(size, device, dtype), torch.randint(512, (1, size.tokens), device=device)
    steps = []
    with with_checkpointing(model, "lt_tiled", size.shards) as tiled, ExitStack() as stack:
        spent = {kind: stack.enter_context(_timed(places)) for kind, places in CHECKS.items()}
        step = step_of(tiled, ids)
        for _ in range(rounds + 1):
            for seconds in spent.values():
                seconds.clear()
            steps.append((step(), *(sum(seconds) for seconds in spent.values())))
    later = tuple(statistics.median(column) for column in zip(*steps[1:], strict=True))
    return {"first": steps[0], "later": later}


@contextmanager
def _timed(places: list[tuple[Any, str]]) -> Iterator[list[float]]:
    """Collect the seconds of each call of some functions; of calls inside of others, once."""
    seconds: list[float] = []
    inside = 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            start, inside = time.perf_counter(), inside + 1
            try:
                return function(*args, **kwargs)
            finally:
                inside -= 1
                if not inside:
                    seconds.append(time.perf_counter() - start)

        return run

    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, function in before:
        setattr(owner, name, timed(function))
    try:
        yield seconds
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
