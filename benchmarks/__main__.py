"""Run all benchmarks: ``python -m benchmarks [--quick] [--only costs loss]``.

Tables are printed as soon as they are measured; ✓ and ✗ are verdicts. ``--quick`` takes a few minutes on two cores.
Packages other than DeepSpeed are measured if they are installed: ``liger-kernel``, ``axolotl``, ``verl``,
``cut-cross-entropy``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

import torch

from benchmarks.correctness import correctness
from benchmarks.costs import costs, host, step_time
from benchmarks.engines import engines
from benchmarks.harness import Options, Table
from benchmarks.longest import longest
from benchmarks.loss import loss
from benchmarks.sequence_parallel import sequence_parallel

SECTIONS: dict[str, Callable[[Options], list[Table]]] = {
    "correctness": correctness,
    "engines": engines,
    "costs": costs,
    "step_time": step_time,
    "host": host,
    "loss": loss,
    "sequence_parallel": sequence_parallel,
    "longest": longest,
}


def main() -> None:
    """Run the command."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SECTIONS, help="of: " + ", ".join(SECTIONS))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("lt_tiled").setLevel(logging.WARNING)  # the tables name the number of tiles
    for name in args.only or SECTIONS:
        torch.manual_seed(0)
        for table in SECTIONS[name](Options(device, args.quick)):
            print(table.text(), flush=True)


if __name__ == "__main__":
    main()
