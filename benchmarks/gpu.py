"""Measure on a GPU in ten minutes: ``python -m benchmarks.gpu [--minutes 10] [--only PART ...] [--json FILE]``.

It needs this repository, torch, Lightning and transformers; other packages are measured if they are installed. Each
part has a process and a share of the time of its own, so that one that hangs or runs out of memory ends alone, and what
is found is written to the JSON file at once. Without a GPU, or with ``--tiny``, every part runs at a tiny size, which
tells whether it runs and nothing else. ``--render FILE`` writes the tables of such a file into docs/.
"""

from __future__ import annotations

import argparse
import json
import logging
import operator
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.sheet import Cell, Sheet, device_at_hand, machine, version_of

ROOT = Path(__file__).parents[1]
WEIGHTS = {
    "tests": 24,
    "offload": 20,
    "peak": 18,
    "steps": 10,
    "longest": 14,
    "compiled": 10,
    "segments": 6,
    "head_tiles": 6,
    "engines": 8,
}
"""The share of the time of each part. What one leaves goes to those behind it."""
ENVIRONMENT = {"segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
GRACE = 15
"""Seconds at the end of its share in which a part finishes its last row. Then it is killed."""
PACKAGES = ("torch", "lightning", "transformers", "deepspeed", "liger-kernel", "triton")
Figures = dict[str, Any]


def main() -> None:
    """Run all parts, or one of them in this process, or write what was found into docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together (default: 10)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=WEIGHTS, help="of: " + ", ".join(WEIGHTS))
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="default: gpu.json")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU, too")
    parser.add_argument("--render", metavar="FILE", help="measure nothing, and write the tables of a JSON file")
    parser.add_argument("--part", choices=WEIGHTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.render:
        render(json.loads(Path(args.render).read_text()))
    elif args.part:
        for name, figures in in_this_process(args.part, args.seconds, args.tiny):
            with Path(args.json).open("a") as file:
                file.write(json.dumps([name, figures]) + "\n")
    else:
        told = run(args.only or list(WEIGHTS), args.minutes * 60, args.tiny, Path(args.json))
        for sheet in sheets(told):
            print(f"\n{sheet.title}\n\n{sheet.markdown()}")


def run(parts: list[str], seconds: float, tiny: bool, file: Path) -> dict[str, Any]:
    """Run parts one after the other, and return and write what each row found."""
    device = device_at_hand()
    told: dict[str, Any] = {
        "versions": {package: version_of(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": machine(device),
        "reason": "no CUDA device" if device.type != "cuda" else "a tiny size" if tiny else "",
        "seconds": {},
        "found": {part: {} for part in parts},
    }
    # One process starts faster than ten, and on a CPU nothing runs out of memory or hangs.
    start: Callable[..., Iterator[tuple[str, Figures]]] = own_process if device.type == "cuda" else in_this_process
    end = time.monotonic() + seconds
    for index, part in enumerate(parts):
        begun = time.monotonic()
        share = WEIGHTS[part] / sum(WEIGHTS[name] for name in parts[index:])
        limit = 1.0 if told["reason"] == "no CUDA device" else max(share * (end - begun) - GRACE, 5)
        for name, figures in start(part, limit, tiny or device.type != "cuda"):
            told["found"][part][name] = figures
            told["seconds"][part] = round(time.monotonic() - begun, 1)
            file.write_text(json.dumps(told, indent=1))
            print(f"{time.monotonic() - end + seconds:5.0f} s  {part}: {name}: {text(figures)}", flush=True)
    return told


def in_this_process(part: str, seconds: float, tiny: bool) -> Iterator[tuple[str, Figures]]:
    """Yield what the rows of a part find."""
    try:
        from benchmarks.gpu_parts import Place, measure
    except Exception as error:  # a package is missing, or another version
        yield part, {"error": repr(error), "printed": traceback.format_exc().splitlines()[-20:]}
        return
    for name in ("lt_tiled", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    yield from measure(part, Place(tiny, seconds))


def own_process(part: str, seconds: float, tiny: bool) -> Iterator[tuple[str, Figures]]:
    """Yield what the rows of a part find in a process that is killed when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        rows, printed = Path(folder) / "rows", Path(folder) / "printed"
        rows.touch()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--part",
            part,
            "--seconds",
            str(seconds),
            "--json",
            str(rows),
        ]
        with printed.open("w") as out:
            child = subprocess.Popen(
                [*command, *(["--tiny"] if tiny else [])],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                    **ENVIRONMENT.get(part, {}),
                },
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        late, ended, rest, deadline = False, False, "", time.monotonic() + seconds + GRACE
        try:
            with rows.open() as lines:
                while not ended:
                    ended = child.poll() is not None
                    if not ended and time.monotonic() > deadline:
                        late, ended = True, True
                        os.killpg(child.pid, signal.SIGKILL)
                        child.wait()
                    *whole, rest = (rest + lines.read()).split("\n")
                    yield from ((name, figures) for name, figures in map(json.loads, whole))
                    time.sleep(0 if ended else 0.2)
        finally:
            if child.poll() is None:  # Ctrl-C
                os.killpg(child.pid, signal.SIGKILL)
        if late or child.returncode:
            why = f"cut off after {seconds + GRACE:.0f} s" if late else f"ended with code {child.returncode}"
            yield part, {"error": why, "printed": printed.read_text(errors="replace").splitlines()[-20:]}


def text(figures: Figures) -> str:
    """Return the figures of a row on one line."""
    if "missing" in figures:
        return f"not measured: {figures['missing']}"
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
        if name != "printed"
    )


def sheets(told: dict[str, Any]) -> list[Sheet]:
    """Return the verdicts and the figures as tables."""
    figures = Sheet("gpu_figures", "figures on a GPU", ["part", "", "found"])
    note = ", ".join(f"{package} {version}" for package, version in told["versions"].items())
    figures.notes = [f"{told['machine']}; Python {told['python']}; {note}."]
    for part, rows in told["found"].items():
        for name, found in rows.items():
            only_ran = told["reason"] and not {"error", "missing"} & found.keys()
            figures.add(part, name, f"ran; not measured: {told['reason']}" if only_ran else text(found))
    return [goals(told), figures]


def goals(told: dict[str, Any]) -> Sheet:
    """Return the table of goals, each reached, not reached, or not measured with the reason."""
    sheet = Sheet("gpu_goals", "goals on a GPU", ["", "goal", "measured"])

    def figure(part: str, name: str, key: str) -> Any:
        return told["found"].get(part, {}).get(name, {}).get(key)

    def judge(what: str, goal: str, value: Any, reached: Callable[[Any], bool], why: str = "it did not run") -> None:
        if told["reason"]:
            value, why = None, told["reason"]
        cell = Cell(f"not measured: {why}")
        if value is not None:
            cell = Cell(value if isinstance(value, str) else f"{value:.3f}", reached(value))
        sheet.add(what, goal, cell)

    passed, failed = (figure("tests", "pytest -m gpu", key) for key in ("passed", "failed"))
    cut = figure("tests", "pytest -m gpu", "error")
    result = None if not passed else f"{passed} passed, {failed} failed" + (f", {cut}" if cut else "")
    judge("tests that need a GPU", "all pass", result, lambda _: failed == 0 and not cut, cut or "it did not run")
    for tokens, bound in ((32768, 1.06), (131072, 1.01)):
        value = figure("offload", f"{tokens} tokens", "relative step time")
        what = f"step time with block inputs in CPU memory, {tokens} tokens, relative to without"
        judge(what, f"at most {bound}", value, partial(operator.ge, bound))
    key = "predicted over measured"
    rows = {**told["found"].get("peak", {}), **told["found"].get("segments", {})}
    predictions = [found[key] for found in rows.values() if key in found]
    worst = max(predictions, key=lambda ratio: abs(ratio - 1), default=None)
    judge("predicted over measured peak, the worst", "within 5 %", worst, lambda ratio: abs(ratio - 1) <= 0.05)
    steps = {name: found.get("relative step time") for name, found in told["found"].get("steps", {}).items()}
    others = [value for name, value in steps.items() if name not in ("untiled", "lt_tiled") and value]
    why = "it did not run" if not steps.get("lt_tiled") else "no other package is installed"
    value = steps.get("lt_tiled") if others else None
    least = f" ({min(others):.3f})" if others and not told["reason"] else ""
    judge(
        "step time with tiled MLPs, relative to untiled",
        f"below all others{least}",
        value,
        lambda v: v < min(others),
        why,
    )
    bad = [
        f"{part}: {name}" for part, rows in told["found"].items() for name, found in rows.items() if "error" in found
    ]
    judge("parts of this command", "no error", ", ".join(bad) or "none", lambda _: not bad)
    return sheet


def render(told: dict[str, Any]) -> None:
    """Write the tables into the documentation."""
    from benchmarks.__main__ import write_all

    write_all(sheets(told))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
