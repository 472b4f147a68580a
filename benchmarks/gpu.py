"""Measure on a GPU in ten minutes: ``python -m benchmarks.gpu [--minutes 10] [--only PART ...] [--json FILE]``.

It needs this repository, torch, Lightning and transformers; other packages are measured if they are installed. Each
part has a process and a share of the time of its own, so that one that hangs or runs out of memory ends alone. All
parts run at a tiny size first, which shows errors early. Each figure is written to the JSON file at once, and a run
that is ended from outside keeps what it found. Without a GPU, or with ``--tiny``, every part runs at the tiny size
alone, which tells whether it runs and nothing else. ``--render FILE`` writes the tables of such a file into docs/.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.sheet import PACKAGES, Cell, Sheet, device_at_hand, machine, version_of

ROOT = Path(__file__).parents[1]
WEIGHTS = {
    "tiny": 15,
    "tests": 20,
    "offload": 36,
    "peak": 18,
    "steps": 10,
    "longest": 12,
    "compiled": 14,
    "segments": 6,
    "engines": 8,
}
"""The share of the time of each part. What one leaves goes to those behind it."""
ENVIRONMENT = {"segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
GRACE = 15
"""Seconds at the end of its share, or a quarter of it, in which a part finishes its last row. Then it is killed."""
NO_TIME = "no time left"
"""What the rows say that were not begun, or not finished, when a part or the command ended."""
MEASURED_ELSEWHERE = "tests/planner/test_gpu.py"
"""The part ``peak`` compares predictions with the allocator, as these tests do at other lengths."""
VERSIONS = ("torch", "lightning", "transformers", "triton", *PACKAGES.values())
COMPARED = {
    "predicted over measured": ("peak", "segments"),
    "relative loss": ("peak", "compiled", "segments", "engines"),
}
"""The ratios of which the worst is a goal, and the parts whose rows have them."""
FEWEST = 3
"""The rounds of steps below which a step time has no verdict."""
Figures = dict[str, Any]


def main() -> None:
    """Run all parts, or one of them in this process, or write what was found into docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together (default: 10)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=WEIGHTS, help="of: " + ", ".join(WEIGHTS))
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="default: gpu.json")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes alone, on a GPU, too")
    parser.add_argument("--render", metavar="FILE", help="measure nothing, and write the tables of a JSON file")
    parser.add_argument("--part", choices=WEIGHTS, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.render:
        from benchmarks.__main__ import write_all

        write_all(sheets(json.loads(Path(args.render).read_text())))
    elif args.part:
        for row in in_this_process(args.part, args.end, args.tiny):
            with Path(args.json).open("a") as file:
                file.write(json.dumps(row) + "\n")
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what is running
        try:
            run(args.only or list(WEIGHTS), args.minutes * 60, args.tiny, Path(args.json))
        finally:
            for sheet in sheets(json.loads(Path(args.json).read_text())):
                print(f"\n{sheet.title}\n\n{sheet.markdown()}", flush=True)


def run(parts: list[str], seconds: float, tiny: bool, file: Path) -> dict[str, Any]:
    """Run parts one after the other, and return and write what each row found."""
    start, device = time.monotonic(), device_at_hand()
    on_gpu = device.type == "cuda"
    tiny_alone = tiny or not on_gpu
    parts = [part for part in parts if part != "tiny" or not tiny_alone]
    results: dict[str, Any] = {
        "versions": {package: version_of(package) for package in VERSIONS},
        "python": platform.python_version(),
        "machine": machine(device),
        "reason": "a tiny size" if on_gpu and tiny else "" if on_gpu else "no CUDA device",
        "seconds": {},
        "found": {part: {part: {"missing": NO_TIME}} for part in parts},
    }
    write(file, results)
    for index, part in enumerate(parts):
        begun = time.monotonic()
        left = start + seconds - begun
        if left <= 0:
            break
        rows: dict[str, Figures] = {}
        share = WEIGHTS[part] / sum(WEIGHTS[name] for name in parts[index:])
        for name, figures in start_of(part, on_gpu)(part, begun + share * left, tiny_alone):
            rows[name] = figures
            results["found"][part] = rows
            results["seconds"][part] = round(time.monotonic() - begun, 1)
            write(file, results)
            if NO_TIME not in figures.values():
                print(f"{time.monotonic() - start:5.0f} s  {part}: {name}: {text(figures)}", flush=True)
    return results


def write(file: Path, results: dict[str, Any]) -> None:
    """Write the results so that the file is complete whenever the process is killed."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(results, indent=1))
    new.replace(file)


def start_of(part: str, on_gpu: bool) -> Callable[[str, float, bool], Iterator[tuple[str, Figures]]]:
    """Return what runs a part: a process of its own on a GPU."""
    if part == "tests":
        return run_tests
    # One process starts faster than ten, and on a CPU nothing runs out of memory or hangs.
    return own_process if on_gpu else in_this_process


def in_this_process(part: str, end: float, tiny: bool) -> Iterator[tuple[str, Figures]]:
    """Yield what the rows of a part find until ``end``, a time of the monotonic clock that all processes share."""
    try:
        from benchmarks.gpu_parts import Setup, measure
    except Exception as error:  # a package is missing, or another version
        yield part, {"error": repr(error), "printed": traceback.format_exc().splitlines()[-20:]}
        return
    for name in ("lt_tiled", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if (device := device_at_hand()).type == "cpu":
        # Several threads would wait for each other, for tiny products. Lightning, too, sets their number.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    gc.freeze()  # collections after each row skip what the imports made
    yield from measure(part, Setup(tiny, end, device))


def own_process(part: str, end: float, tiny: bool) -> Iterator[tuple[str, Figures]]:
    """Yield what the rows of a part find in a process that is killed at ``end``."""
    with tempfile.TemporaryDirectory() as folder:
        rows, printed = Path(folder) / "rows", Path(folder) / "printed"
        rows.touch()
        left = end - time.monotonic()
        soft_end = str(end - min(GRACE, left / 4))
        command = ["-m", "benchmarks.gpu", *(["--tiny"] if tiny else []), "--part", part, "--end", soft_end]
        with rows.open() as lines:
            rest = ""
            for ended in watch([*command, "--json", str(rows)], end, printed, ENVIRONMENT.get(part, {})):
                *complete, rest = (rest + lines.read()).split("\n")
                yield from ((name, figures) for name, figures in map(json.loads, complete))
                if ended:
                    yield part, {**ended, "printed": read(printed)[-20:]}


def run_tests(part: str, end: float, tiny: bool) -> Iterator[tuple[str, Figures]]:
    """Yield how many of the tests that need a GPU have passed so far, until all have run or ``end`` has come."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    on_gpu = [file for file, source in sources.items() if "mark.gpu" in source or "device: str" in source]
    files = [file for file in on_gpu if file != MEASURED_ELSEWHERE]
    first = ("tests/loss", "tests/offload")
    files.sort(key=lambda file: ("compile" in sources[file], not file.startswith(first), file))  # compiling takes long
    options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts="]
    with tempfile.TemporaryDirectory() as folder:
        printed, figures = Path(folder) / "printed", Figures()
        command = ["-m", "pytest", *options, *(["tests/test_memory.py"] if tiny else files)]
        for ended in watch(command, end, printed, {}):
            before, figures = figures, outcomes(read(printed), {"missing": NO_TIME} if ended is None else ended)
            if figures != before:
                yield "pytest -m gpu", figures


def watch(command: list[str], end: float, printed: Path, environment: dict[str, str]) -> Iterator[Figures | None]:
    """Run Python and kill it at ``end``. Yield ``None`` while it runs, then what is wrong with how it ended, or ``{}``.

    Args:
        command: The arguments of Python.
        end: A time of the monotonic clock.
        printed: The file into which the process prints.
        environment: What is added to this process's.
    """
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **environment}
    begun = time.monotonic()
    with printed.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while child.poll() is None and time.monotonic() < end:
            yield None
            time.sleep(0.2)
        late = child.poll() is None
    finally:
        if child.poll() is None:  # also after Ctrl-C or SIGTERM
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if late:
        yield {"missing": f"{NO_TIME}: cut off after {time.monotonic() - begun:.0f} s"}
    else:
        yield {"error": f"ended with code {child.returncode}"} if child.returncode else {}


def read(file: Path) -> list[str]:
    """Return the lines of what a process prints."""
    return file.read_text(errors="replace").splitlines()


def outcomes(lines: list[str], ended: Figures) -> Figures:
    """Count the outcomes in the lines that pytest prints, and keep what it prints of failures.

    Args:
        lines: What it has printed.
        ended: What is wrong with how it ended. That tests failed is no error of the run.
    """
    found = Counter(
        match[1] for line in lines if (match := re.match(r"tests/\S+::.+? (PASSED|FAILED|ERROR|SKIPPED)", line))
    )
    failed = found["FAILED"] + found["ERROR"]
    figures: Figures = {"passed": found["PASSED"], "failed": failed, "skipped": found["SKIPPED"]}
    if failed and ended == {"error": "ended with code 1"}:
        ended = {}
    if not found and "missing" not in ended:
        ended = {"error": "pytest ran no test: " + (lines[-1] if lines else str(ended))}
    if failed or "error" in ended:
        figures["printed"] = lines[-200:]
    return figures | ended


def text(figures: Figures) -> str:
    """Return the figures of a row on one line."""
    names = {"missing": "not measured:"}
    return ", ".join(
        f"{names.get(name, name)} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in figures.items()
        if name != "printed"
    )


def sheets(results: dict[str, Any]) -> list[Sheet]:
    """Return the verdicts and the figures as tables."""
    figures = Sheet("gpu_figures", "figures on a GPU", ["part", "", "found"])
    note = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    figures.notes = [f"{results['machine']}; Python {results['python']}; {note}."]
    for part, rows in results["found"].items():
        for name, found in rows.items():
            only_ran = (results["reason"] or part == "tiny") and not {"error", "missing"} & found.keys()
            reason = results["reason"] or "a tiny size"
            figures.add(part, name, f"ran; not measured: {reason}" if only_ran else text(found))
    return [goals(results), figures]


def is_late(row: Figures) -> bool:
    """Return whether there was no time for a row, or not for all of it."""
    return str(row.get("missing", "")).startswith(NO_TIME)


def goals(results: dict[str, Any]) -> Sheet:
    """Return the table of goals, each reached, not reached, or not measured with the reason."""
    sheet = Sheet("gpu_goals", "goals on a GPU", ["", "goal", "measured"])
    found: dict[str, dict[str, Figures]] = results["found"]

    def add(what: str, goal: str, value: str | None, reached: bool | None, rows: Any = (), why: str = "") -> None:
        """Add a goal; without a value, say why by what these rows say."""
        if results["reason"]:
            value, why = None, results["reason"]
        said = [row.get("missing") or row.get("error") for row in rows]
        cell = Cell(f"not measured: {why or next(filter(None, said), 'it did not run')}")
        sheet.add(what, goal, cell if value is None else Cell(value, reached))

    def rows_of(part: str, *names: str) -> list[Figures]:
        rows = found.get(part, {})
        return [rows.get(name, {}) for name in (*names, part)]

    def step_time(row: Figures) -> tuple[str | None, float | None]:
        """Return the ratio of a row with the rounds that it rests on, and the ratio if these are enough."""
        if "relative step time" not in row:
            return None, None
        ratio, rounds = row["relative step time"], row["rounds"]
        return f"{ratio:.3f} ({rounds} rounds)", ratio if rounds >= FEWEST else None

    def add_worst(what: str, key: str, bound: float) -> None:
        """Add the ratio that is furthest from 1. It has to be within the bound in each row that it was sought in."""
        rows = [
            row
            for part in COMPARED[key]
            for name, row in found.get(part, {}).items()
            if name != part or len(found[part]) == 1  # how a part ended is no row of it
        ]
        ratios = [row[key] for row in rows if key in row]
        late = [row for row in rows if key not in row and ("error" in row or is_late(row))]
        worst = max(ratios, key=lambda ratio: (math.isnan(ratio), abs(ratio - 1)), default=math.nan)
        value = f"{worst:.3f}" + (f" ({len(ratios)} of {len(ratios) + len(late)} rows)" if late else "")
        reached = abs(worst - 1) <= bound and (None if late else True)
        add(what, f"within {bound:.0%}".replace("%", " %"), value if ratios else None, reached, rows)

    tests = rows_of("tests", "pytest -m gpu")
    passed, failed = (tests[0].get(key) for key in ("passed", "failed"))
    cut, error = (tests[0].get(key, "") for key in ("missing", "error"))
    result = None if passed is None else ", ".join(filter(None, (f"{passed} passed, {failed} failed", cut, error)))
    verdict = False if failed or error else None if cut or not passed else True
    add("tests that need a GPU", "all pass", result, verdict, tests)
    for tokens, bound in ((32768, 1.06), (131072, 1.01)):
        rows = rows_of("offload", f"{tokens} tokens")
        what = f"step time with block inputs in CPU memory, {tokens} tokens, relative to without"
        value, ratio = step_time(rows[0])
        add(what, f"at most {bound}", value, None if ratio is None else ratio <= bound, rows)
    add_worst("predicted over measured peak, the worst", "predicted over measured", 0.05)
    add_worst("loss, relative to the first row of its part, the worst", "relative loss", 0.01)
    steps = {name: row for name, row in found.get("steps", {}).items() if name in PACKAGES}
    own = steps.pop("lt_tiled", {})
    times = {name: row["relative step time"] for name, row in steps.items() if "relative step time" in row}
    details = [f"{name} {time:.3f}" for name, time in times.items()]
    details += [
        f"{name} not measured: {row.get('missing') or row.get('error')}"
        for name, row in steps.items()
        if name not in times
    ]
    details = [] if results["reason"] else details
    value, ratio = step_time(own)
    add(
        "step time with tiled MLPs, relative to untiled",
        f"below all others ({', '.join(details)})" if details else "below all others",
        value if times else None,
        ratio < min(times.values()) if times and ratio is not None else None,
        rows_of("steps", "lt_tiled"),
        why="no other package was measured" if value else "",
    )
    bad = [f"{part}: {name}" for part, rows in found.items() for name, row in rows.items() if "error" in row]
    late = [part for part, rows in found.items() if any(map(is_late, rows.values()))]
    value = (", ".join(bad) or "none") + (f"; not finished: {', '.join(late)}" if late else "")
    add("parts of this command", "no error", value, not bad)
    return sheet


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
