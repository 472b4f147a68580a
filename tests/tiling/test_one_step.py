"""How many files one training step enters, which is what a reader must open to follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lt_tiled
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from tests.architectures import ARCHITECTURES

PACKAGE = Path(lt_tiled.__file__).parent
MOST = 10


def entered(run: Callable[[], Any]) -> set[str]:
    """The files of the package whose functions a run calls."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


AROUND = {"checkpointing.py", "determinism.py", "sequence_parallel/region.py"}
AROUND |= {"tiling/observe.py", "tiling/places.py", "tiling/reach.py"}


def test_a_step_is_read_in_few_files() -> None:
    """A tiled forward enters at most ten files, and a tiled backward with the recompute of its block at most ten.

    From the second step on: the first one checks the modules too. Not counted are what they read being observed, and
    activation checkpointing around them, which also asks whether ranks share the sequence.
    """
    architecture = ARCHITECTURES["Llama"]
    net = architecture.build(torch.float32)
    with prepare(net, tiling=Tiling(num_shards=4), activation_checkpointing=ActivationCheckpointing()):
        net(**architecture.feed(net)).loss.backward()
        losses: list[torch.Tensor] = []
        forward = entered(lambda: losses.append(net(**architecture.feed(net)).loss)) - AROUND
        backward = entered(losses[0].backward) - AROUND
    assert "tiling/autograd.py" in forward & backward
    assert len(forward) <= MOST, sorted(forward)
    assert len(backward) <= MOST, sorted(backward)
