"""How many files and functions one training step enters, which is what a reader must open to follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lt_tiled
from lt_tiled import Tiling, prepare
from tests.architectures import ARCHITECTURES
from tests.forks import FORKS

PACKAGE = Path(lt_tiled.__file__).parent
Functions = list[tuple[str, str, int]]
"""File, name and line of each call of a function of the package."""


def functions_called(run: Callable[[], Any]) -> Functions:
    """The functions of the package that a run calls, each as often as it is called."""
    functions: Functions = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if event == "call" and path.is_relative_to(PACKAGE):
            functions.append((str(path.relative_to(PACKAGE)), code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions


def later_step(options: dict[str, Any]) -> tuple[Functions, Functions]:
    """The functions called in the forward pass of a later step, and in its backward pass."""
    architecture = ARCHITECTURES["Llama"]
    net = architecture.build(torch.float32)
    with prepare(net, tiling=Tiling(num_shards=4), **options):
        for _ in range(2):
            net(**architecture.feed(net)).loss.backward()
        losses: list[torch.Tensor] = []
        forward = functions_called(lambda: losses.append(net(**architecture.feed(net)).loss))
        return forward, functions_called(losses[0].backward)


def files(functions: Functions) -> set[str]:
    """The files that are entered."""
    return {file for file, _, _ in functions}


def jumps(functions: Functions) -> int:
    """How often a reader of the functions in the order of their first calls goes to another file."""
    order = [file for file, _, _ in dict.fromkeys(functions)]
    return sum(a != b for a, b in pairwise(order))


ROWS = {
    # options; the most files that forward and backward enter, jumps between files, and calls of a step
    "tiles": ({}, (13, 10), (61, 34), 2350),
    "tiles, loss, recomputed blocks": ({"activation_checkpointing": True, "loss": True}, (27, 20), (118, 105), 4900),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_step_is_read_in_few_files(row: str) -> None:
    """A later step of a Llama enters few files, with few jumps between them, in few Python calls. The aim for the whole
    step is 16 files forward, 12 backward, 45 jumps each, and 2,000 calls. Blocks take 1,300 of the calls themselves,
    and run the tiles of norms and projections once more.
    """
    options, most_files, most_jumps, most_calls = ROWS[row]
    with FORKS.Pool(1) as pool:  # in this process, attention may be that of models that were not released
        step = pool.apply(later_step, (options,))
    for functions, number, limit in zip(step, most_files, most_jumps, strict=True):
        assert len(files(functions)) <= number, sorted(files(functions))
        assert jumps(functions) <= limit
    assert len(step[0]) + len(step[1]) <= most_calls
