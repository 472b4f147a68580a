"""How many files one training step enters, which is what a reader must open to follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lt_tiled
from lt_tiled import Tiling, prepare
from tests.architectures import ARCHITECTURES
from tests.forks import FORKS

PACKAGE = Path(lt_tiled.__file__).parent
MOST = 10
MOST_CALLS = 6269
"""Python calls of a later step, but for those in which the recompute is compared with its forward pass."""


def functions_entered(run: Callable[[], Any]) -> list[str]:
    """The file of each function of the package that a run calls, in the order of their first calls."""
    functions: dict[tuple[str, str, int], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            code = frame.f_code
            functions.setdefault((str(path.relative_to(PACKAGE)), code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [path for path, _, _ in functions]


def calls(run: Callable[[], Any]) -> int:
    """How many functions of the package a run calls, each as often as it is called."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def entered(run: Callable[[], Any]) -> set[str]:
    """The files of the package whose functions a run calls."""
    return set(functions_entered(run))


AROUND = {"checkpointing.py", "determinism.py", "modules/cache.py", "sequence_parallel/region.py"}
AROUND |= {"tiling/observe.py", "tiling/places.py", "tiling/reach.py"}


def test_a_step_is_read_in_few_files() -> None:
    """A tiled forward enters at most ten files, and a tiled backward with the recompute of its block at most ten.

    From the second step on: the first one checks the modules too. Not counted are what they read being observed, and
    activation checkpointing around them, which also asks whether ranks share the sequence.
    """
    architecture = ARCHITECTURES["Llama"]
    net = architecture.build(torch.float32)
    with prepare(net, tiling=Tiling(num_shards=4), activation_checkpointing=True):
        net(**architecture.feed(net)).loss.backward()
        losses: list[torch.Tensor] = []
        forward = entered(lambda: losses.append(net(**architecture.feed(net)).loss)) - AROUND
        backward = entered(losses[0].backward) - AROUND
    assert "tiling/autograd.py" in forward & backward
    assert len(forward) <= MOST, sorted(forward)
    assert len(backward) <= MOST, sorted(backward)


def later_step() -> tuple[list[str], list[str], int]:
    """The functions entered in a later step with tiled loss, forward and backward, and the calls of another one."""
    architecture = ARCHITECTURES["Llama"]
    net = architecture.build(torch.float32)
    with prepare(net, tiling=Tiling(num_shards=4), activation_checkpointing=True, loss=True):
        net(**architecture.feed(net)).loss.backward()
        losses: list[torch.Tensor] = []
        forward = functions_entered(lambda: losses.append(net(**architecture.feed(net)).loss))
        backward = functions_entered(losses[0].backward)
        return forward, backward, calls(lambda: net(**architecture.feed(net)).loss.backward())


def test_the_whole_step_is_read_in_few_jumps() -> None:
    """Such a step enters so many files, with so many jumps between files in the order in which functions are entered
    first. The aim is 14 files forward, 12 backward, 45 jumps each. A later step makes a third fewer Python calls than
    the 10,145 of 0.2.0.
    """
    with FORKS.Pool(1) as pool:  # in this process, attention may be that of models that were not released
        forward, backward, later = pool.apply(later_step)
    assert later <= MOST_CALLS
    for paths, files, jumps in ((forward, 23, 107), (backward, 15, 98)):
        assert len(set(paths)) <= files, sorted(set(paths))
        assert sum(a != b for a, b in pairwise(paths)) <= jumps
