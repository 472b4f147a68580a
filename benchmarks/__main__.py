"""Run all benchmarks: ``python -m benchmarks [--quick] [--only costs loss]``.

Tables are printed as soon as they are measured; ✓ and ✗ are verdicts. ``--quick`` takes a few minutes on two cores.
Packages other than DeepSpeed are measured if they are installed: ``liger-kernel``, ``axolotl``, ``verl``,
``cut-cross-entropy``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.correctness import correctness
from benchmarks.costs import costs, step_time
from benchmarks.engines import engines
from benchmarks.experts import experts
from benchmarks.harness import Options, Table
from benchmarks.host import host
from benchmarks.longest import longest
from benchmarks.loss import loss
from benchmarks.peers import peers
from benchmarks.sequence_parallel import sequence_parallel

SECTIONS: dict[str, Callable[[Options], list[Table]]] = {
    "peers": peers,
    "correctness": correctness,
    "engines": engines,
    "costs": costs,
    "step_time": step_time,
    "host": host,
    "loss": loss,
    "experts": experts,
    "sequence_parallel": sequence_parallel,
    "longest": longest,
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SECTIONS, help="of: " + ", ".join(SECTIONS))
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where block inputs are offloaded to")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(device, args.quick, args.directory)
    logging.getLogger("lt_tiled").setLevel(logging.WARNING)  # the tables name the number of tiles
    failed, start = [], time.perf_counter()
    for name in args.only or SECTIONS:
        torch.manual_seed(0)
        try:
            for table in SECTIONS[name](options):
                print(table.text(), flush=True)
        except Exception as error:  # the others run
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
