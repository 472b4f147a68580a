"""What a step costs the host, in exact counts, and how much a reader must open to follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lt_tiled
from lt_tiled import Tiling, prepare, tile
from tests.architectures import ARCHITECTURES
from tests.models import GatedMLP, H
from tests.parity import randn
from tests.processes import FORKS

PACKAGE = Path(lt_tiled.__file__).parent
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
"""Code that is a call in some versions of Python."""
Functions = list[tuple[str, str, int]]
"""File, name and line of each call of a function of the package."""


def functions_called(run: Callable[[], Any]) -> Functions:
    """The functions of the package that a run calls, each as often as it is called."""
    functions: Functions = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if event == "call" and path.is_relative_to(PACKAGE) and code.co_name not in INLINED:
            functions.append((str(path.relative_to(PACKAGE)), code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions


def step(module: nn.Module, tiles: int) -> Callable[[], None]:
    """Return a training step in so many tiles of four tokens, after two that learn."""
    module, x = tile(module, num_shards=tiles, self_check=False), randn(1, 4 * tiles, H)

    def run() -> None:
        module(x).sum().backward()

    run()
    run()
    return run


def calls_of_a_tile(build: Callable[[], nn.Module]) -> float:
    """Return how many calls of the package's functions one tile more is."""
    few, many = (len(functions_called(step(build(), tiles))) for tiles in (8, 24))
    return (many - few) / 16


def many_operations() -> nn.Module:
    """Return an MLP whose activation is eight operations more, of which each saves a tensor."""
    return GatedMLP(act=lambda x: F.silu(x).sin().cos().sin().cos().sin().cos().sin().cos())


def test_calls_of_a_tile() -> None:
    """One tile more of a gated MLP is at most 18 calls of lt_tiled's functions, forward and backward, however many
    operations the tile has.
    """
    assert 0 < calls_of_a_tile(many_operations) == calls_of_a_tile(GatedMLP) <= 18


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
    "tiles": ({}, (13, 8), (48, 25), 1850),
    "tiles, loss, recomputed blocks": ({"activation_checkpointing": True, "loss": True}, (20, 16), (75, 64), 3400),
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
