"""Run all benchmarks: ``python -m benchmarks [--quick] [--only costs loss] [--json results.json] [--write]``.

Tables are printed as soon as they are measured; ✓ and ✗ are verdicts. ``--json`` writes them with versions, seed and
load. ``--write`` writes them as Markdown between the ``<!-- benchmark: NAME -->`` comments of docs/. ``--quick`` takes
about three minutes on two cores. Peers other than DeepSpeed are measured if they are installed: ``liger-kernel``,
``axolotl``, ``verl``, ``unsloth``, ``cut-cross-entropy``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.alarms import alarms
from benchmarks.checks import checks
from benchmarks.correctness import correctness, rounding
from benchmarks.costs import Size, costs
from benchmarks.engines import ROWS, engines
from benchmarks.experts import experts
from benchmarks.host import host
from benchmarks.longest import longest
from benchmarks.loss import loss
from benchmarks.peers import Peer, peers, roll_call
from benchmarks.sequence_parallel import sequence_parallel
from benchmarks.sheet import PACKAGES, Cell, Sheet, device_at_hand, machine, version_of
from benchmarks.step_time import HERE, QUICK, step_time
from lt_tiled._log import progress

ROOT = Path(__file__).parents[1]
SEED = 0
VERSIONS = ("torch", "lightning", "transformers", "cut-cross-entropy", *PACKAGES.values())
Section = Callable[[], list[Sheet]]
SLOW = "longest"
"""The section that ``--quick`` leaves out unless it is named."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="of: " + ", ".join(sections(True, "", [])))
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where block inputs are offloaded to")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/")
    parser.add_argument(
        "--render", metavar="FILE", help="measure nothing, and write the tables of a file that --json wrote"
    )
    args = parser.parse_args()
    if args.render:
        write_all(sheets_of(json.loads(Path(args.render).read_text())))
        return
    chosen = sections(args.quick, args.directory, peers())
    if unknown := set(args.only or ()) - set(chosen):
        parser.error(f"--only {' '.join(sorted(unknown))}: the sections are {', '.join(chosen)}")
    logging.getLogger("lt_tiled").setLevel(logging.WARNING)  # the tables name the number of tiles
    console, found, start = Console(width=None if sys.stdout.isatty() else 160), [], time.perf_counter()
    for name in args.only or [name for name in chosen if not (args.quick and name == SLOW)]:
        with progress(f"Measuring {name}"):
            sheets = _found(name, chosen[name])
        for sheet in sheets:
            console.print(sheet.table(), "")
            found.append(sheet)
        if args.json:  # keeps the results if the next section ends the process
            Path(args.json).write_text(json.dumps(record(found, args.quick), indent=1))
    console.print(f"{time.perf_counter() - start:.0f} s")
    if args.write:
        write_all(found)


def _found(name: str, section: Section) -> list[Sheet]:
    try:
        return section()
    except Exception as error:  # a failed section becomes a table, and the others run
        sheet = Sheet(f"{name}_failed", f"{name} was not measured", ["", ""])
        sheet.add(type(error).__name__, Cell(str(error).strip()[-500:], False))
        return [sheet]


def sections(quick: bool, directory: str, everyone: list[Peer]) -> dict[str, Section]:
    """Return all benchmarks by name."""
    device = device_at_hand()
    rounds = 3 if quick else 9
    few = Size(tokens=1024, hidden=128, intermediate=512, layers=2, shards=8)
    shared = Size(tokens=512 if quick else 2048, hidden=256, intermediate=1024, layers=3)
    rows = [row for row in ROWS if row.lengths == (24, 24) and row.accumulate == 1] if quick else ROWS
    sizes = (2048, 128, 8192) if quick else (4096, 256, 16384)
    if device.type == "cuda":
        sizes = (16384, 4096, 128256)
    return {
        "peers": lambda: [roll_call(everyone)],
        "correctness": lambda: [*correctness(everyone), *rounding(everyone, device)],
        "engines": lambda: engines(everyone, rows),
        "sequence_parallel": lambda: sequence_parallel(shared, (2,) if quick else (2, 4), rounds),
        "costs": lambda: costs(everyone, few if quick else Size()),
        "alarms": lambda: alarms(5 if quick else 2000),
        "checks": lambda: checks(QUICK if quick else HERE, rounds),
        "experts": experts,
        "step_time": lambda: step_time(everyone, device, rounds, quick),
        "host": lambda: host(everyone, 9 if quick else 25),
        "loss": lambda: loss(device, sizes, rounds=rounds),
        "longest": lambda: longest(device, quick, directory),
    }


def record(found: list[Sheet], quick: bool) -> dict[str, Any]:
    """Return the figures with versions, machine and seed."""
    return {
        "versions": {package: version_of(package) for package in VERSIONS},
        "python": platform.python_version(),
        "machine": machine(device_at_hand()),
        "load_at_the_end": os.getloadavg(),
        "seed": SEED,
        "quick": quick,
        "sheets": [asdict(sheet) for sheet in found],
    }


def sheets_of(results: dict[str, Any]) -> list[Sheet]:
    """Read the tables of a record."""
    return [
        Sheet(**{**sheet, "rows": [[Cell(**cell) for cell in row] for row in sheet["rows"]]})
        for sheet in results["sheets"]
    ]


def write_all(found: list[Sheet]) -> None:
    """Write the tables into the documentation."""
    for file in sorted((ROOT / "docs").rglob("*.md")):
        write(file, found)


def write(file: Path, found: list[Sheet]) -> None:
    """Write each table between its comments in a Markdown file, if the file has them."""
    text = file.read_text()
    for sheet in found:
        place = rf"(<!-- benchmark: {re.escape(sheet.name)} -->\n).*?(<!-- end -->)"
        text = re.sub(place, lambda match: f"{match[1]}{sheet.markdown()}\n{match[2]}", text, flags=re.DOTALL)  # noqa: B023
    file.write_text(text)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    main()
