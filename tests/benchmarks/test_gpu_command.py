"""``python -m benchmarks.gpu``: its parts at a tiny size on the CPU, its goals, and what it says of failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts, peers

ROOT = Path(__file__).parents[2]
MISSING = ("deepspeed", "peft", "jsonargparse", "matplotlib", "rich", "xxhash", "tensorboard", "torchao")
PROGRAM = """
import json, lt_tiled
from benchmarks import gpu, gpu_parts
gpu_parts.PARTS["peak"] = lambda place: iter([*gpu_parts.peak(place)][-1:])
print(json.dumps([[part, *row] for part in ("peak", "engines") for row in gpu.in_this_process(part, 0, True)]))
"""


def last(part: str) -> Callable[[gpu_parts.Place], gpu_parts.Rows]:
    return lambda place: iter([*gpu_parts.__dict__[part](place)][-1:])


def test_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of each part runs on the CPU without an error and is written, and no figure of it is claimed."""
    parts = ["offload", "longest", "compiled", "head_tiles"]
    monkeypatch.setattr(gpu_parts, "PARTS", {part: last(part) for part in parts})
    told = gpu.run(parts, 600, False, tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text()) == told
    assert {name: list(rows) for name, rows in told["found"].items()} == {
        "offload": ["131072 tokens"],
        "longest": ["+ block inputs in CPU memory"],
        "compiled": ["CUDA graphs"],
        "head_tiles": ["8 head tiles"],
    }
    assert not any("error" in row for rows in told["found"].values() for row in rows.values())
    assert told["found"]["offload"]["131072 tokens"]["cpu_bytes per step"] == 256 * 64 * 4
    goals, figures = gpu.sheets(told)
    assert {row[2].text for row in goals.rows} == {"not measured: no CUDA device"}
    assert {row[2].text for row in figures.rows} == {"ran; not measured: no CUDA device"}


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """lt_tiled is timed next to the untiled step, and a package that is missing is named with the reason."""
    everyone = [peers.Peer("lt_tiled", gpu_parts.prepare), peers.Peer("Liger", None, "No module named 'triton'")]
    monkeypatch.setattr(gpu_parts, "peers", lambda: everyone)
    found = dict(gpu.in_this_process("steps", 0, True))
    assert {"relative step time", "host time of one tile more [µs]"} <= found["lt_tiled"].keys()
    assert gpu.text(found["Liger"]) == "not measured: No module named 'triton'"


def test_without_optional_packages(tmp_path: Path) -> None:
    """With torch, Lightning and transformers alone, ``import lt_tiled`` and the command work, without ZeRO-3."""
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.lower().startswith(MISSING):
            (tmp_path / entry.name).symlink_to(entry)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-S", "-c", PROGRAM]  # -S leaves out the packages that are installed
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found = {(part, name): figures for part, name, figures in json.loads(done.stdout.splitlines()[-1])}
    assert not [name for name, figures in found.items() if "error" in figures], found
    assert found["engines", "ZeRO-3"] == {"missing": "No module named 'deepspeed'"}
    assert "predicted over measured" in found["peak", "+ block inputs in CPU memory, 65536 tokens"]


def told(**changed: Any) -> dict[str, Any]:
    """What a run on a GPU found that reached all goals, but for what is changed."""
    rows = {
        "tests": {"pytest -m gpu": {"passed": 30, "failed": 0, "skipped": 0}},
        "offload": {f"{n} tokens": {"relative step time": 1.005} for n in (8192, 32768, 131072)},
        "peak": {"plain": {"predicted over measured": 0.98}},
        "steps": {"lt_tiled": {"relative step time": 1.02}, "Liger": {"relative step time": 1.1}},
    }
    found = {**rows, **changed}
    return {"found": found, "reason": "", "versions": {}, "machine": "a GPU", "python": "3.12"}


def verdicts(**changed: Any) -> list[bool | None]:
    return [row[2].good for row in gpu.goals(told(**changed)).rows]


@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, {"tests": {"pytest -m gpu": {"passed": 29, "failed": 1, "skipped": 0}}}),
        (1, {"offload": {"32768 tokens": {"relative step time": 1.07}}}),
        (2, {"offload": {"131072 tokens": {"relative step time": 1.02}}}),
        (3, {"peak": {"plain": {"predicted over measured": 1.01}, "last": {"predicted over measured": 0.94}}}),
        (4, {"steps": {"lt_tiled": {"relative step time": 1.2}, "Liger": {"relative step time": 1.1}}}),
        (5, {"compiled": {"compiled": {"error": "RuntimeError: no"}}}),
    ],
)
def test_goals(index: int, changed: dict[str, Any]) -> None:
    """Each goal is reached by figures within its bound, and missed by one beyond it."""
    assert verdicts() == [True] * 6
    assert verdicts(**changed)[index] is False


def test_goals_that_were_not_measured() -> None:
    """A goal without a figure has no verdict, and one without other packages says so."""
    rows = gpu.goals(told(offload={}, steps={"lt_tiled": {"relative step time": 1.0}})).rows
    assert [row[2].good for row in rows] == [True, None, None, True, None, True]
    assert rows[4][2].text == "not measured: no other package is installed"


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let a script take the place of Python."""
    file = folder / "python"
    file.write_text("\n".join(["#!/bin/bash", *lines]))
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_a_part_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part found before its process died is kept, next to how it ended and what it printed."""
    row = json.dumps(["first", {"step [s]": 1.0}])
    script(tmp_path, monkeypatch, "echo out of memory", f"echo '{row}' >> ${{@: -1}}", "kill -9 $$")
    first, last = gpu.own_process("offload", 600, False)
    assert first == ("first", {"step [s]": 1.0})
    assert last == ("offload", {"error": "ended with code -9", "printed": ["out of memory"]})


def test_a_part_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that does not end is killed when its time is over."""
    script(tmp_path, monkeypatch, "sleep 1000")
    monkeypatch.setattr(gpu, "GRACE", 0)
    ((name, figures),) = gpu.own_process("offload", 0, False)
    assert (name, figures["error"]) == ("offload", "cut off after 0 s")


def test_outcomes() -> None:
    """The outcomes of tests are counted, and what pytest printed of a failure is kept."""
    lines = ["tests/a.py::one PASSED [ 50%]", "tests/a.py::two[x y] FAILED [100%]", "FAILED tests/a.py::two[x y]"]
    found = gpu_parts.outcomes(lines)
    assert found == {"passed": 1, "failed": 1, "skipped": 0, "printed": lines}
    assert gpu_parts.outcomes(["No module named pytest"])["error"] == "pytest ran no test: No module named pytest"
