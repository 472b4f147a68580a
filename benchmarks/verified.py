"""Verify small random instances of architectures of transformers: ``python -m benchmarks.verified [NAME ...]``.

Each is verified as it is, and with gradients of tiles that are 1 % too large, which must fail if it has an MLP to tile.
The first forty are those of the table in docs/models.md when 0.1.0 was written; without names all run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lt_tiled
from lt_tiled.tiling.autograd import TiledFunction
from tests.architectures import ARCHITECTURES

AMPLIFIES = ("LeViT",)
"""Verified in float64: batch norms over a batch of two amplify the rounding of float32 to 2 %, untiled too."""


@contextmanager
def wrong_gradients() -> Iterator[None]:
    """Make all gradients of tiles 1 % too large."""
    true = TiledFunction.backward

    def too_large(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g * 1.01 for g in true(ctx, *gradients))

    TiledFunction.backward = staticmethod(too_large)  # type: ignore[method-assign]
    try:
        yield
    finally:
        TiledFunction.backward = staticmethod(true)  # type: ignore[method-assign]


def verified(name: str, again: bool = True) -> tuple[list[str], bool]:
    """Return the row of an architecture, and whether it is as it should be.

    Args:
        name: The architecture.
        again: Verify it once more with wrong gradients.
    """
    architecture, start = ARCHITECTURES[name], time.perf_counter()
    model = architecture.build(torch.float64 if name in AMPLIFIES else torch.float32)
    batch = architecture.feed(model)
    result = lt_tiled.verify(model, batch)
    wrong = None
    if again and result.tiles is not None:
        with wrong_gradients():
            wrong = lt_tiled.verify(model, batch)
    right = result.passed and not (wrong and wrong.passed)
    worst = f"{result.worst.tiled:.1e} of {result.worst.allowed:.1e}"
    found = "-" if wrong is None else f"{'pass' if wrong.passed else 'fail'}, {wrong.worst.tiled:.1e}"
    seconds = f"{time.perf_counter() - start:.1f} s"
    verdict = "pass" if result.passed else "fail"
    return [name, str(result.tiles or "none"), verdict, worst, found, ", ".join(result.not_tiled), seconds], right


def main(names: list[str]) -> None:
    """Print a row for each architecture, and end with 1 if one is not as it should be.

    Args:
        names: The architectures; all of them if there are none.
    """
    logging.disable(logging.WARNING)
    console, start = Console(width=200), time.perf_counter()
    table = Table("architecture", "tiles", "verdict", "worst error", "1 % wrong", "not tiled", "time")
    wrong = []
    for name in names or ARCHITECTURES:
        row, right = verified(name)
        table.add_row(*row)
        wrong += [] if right else [name]
        print(" | ".join(row), file=sys.stderr, flush=True)
    console.print(table)
    console.print(f"{len(table.rows) - len(wrong)} of {len(table.rows)} are right, {time.perf_counter() - start:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verified", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="an architecture of the tests; all by default")
    main(parser.parse_args().names)
