"""``python -m benchmarks.gpu``: its parts at a tiny size on the CPU, its goals, and what it says of failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_parts

ROOT = Path(__file__).parents[2]
MISSING = ("deepspeed", "peft", "jsonargparse", "matplotlib", "rich", "xxhash", "tensorboard", "torchao")
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
import lt_tiled
from benchmarks import gpu
found = {{name: figures for part in ("peak", "engines") for name, figures in gpu.in_this_process(part, 0, True)}}
print(*(name for name, figures in found.items() if "error" in figures))
print(found)
"""


def test_each_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part but the tests runs on the CPU without an error, writes its figures, and claims none of them."""

    def missing(**_: Any) -> None:  # ZeRO-3 would replace functions of torch in this process
        raise ImportError("no DeepSpeed")

    monkeypatch.setattr(gpu_parts, "TiledDeepSpeedStrategy", missing)
    told = gpu.run([part for part in gpu.WEIGHTS if part != "tests"], 600, True, tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text()) == told
    wrong = {name: row for rows in told["found"].values() for name, row in rows.items() if "error" in row}
    assert wrong == {"ZeRO-3": {"error": "ImportError: no DeepSpeed"}}
    assert {name: len(rows) for name, rows in told["found"].items()} == {
        **{"offload": 3, "peak": 7, "steps": len(told["found"]["steps"]), "longest": 5, "compiled": 3},
        **{"segments": 2, "head_tiles": 4, "engines": 3},
    }
    assert told["found"]["offload"]["32768 tokens"]["cpu_bytes per step"] > 0
    goals, figures = gpu.sheets(told)
    assert {row[2].text for row in goals.rows} == {"not measured: no CUDA device"}
    assert all("not measured" in row[2].text or row[1].text == "ZeRO-3" for row in figures.rows)


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
    """A part that does not end is killed with its children when its time is over."""
    script(tmp_path, monkeypatch, "sleep 1000 & echo $! > " + str(tmp_path / "child"), "wait")
    monkeypatch.setattr(gpu, "GRACE", 3)
    ((name, figures),) = gpu.own_process("offload", 0, False)
    assert (name, figures["error"]) == ("offload", "cut off after 3 s")
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_outcomes() -> None:
    """The outcomes of tests are counted, and what pytest printed of a failure is kept."""
    lines = ["tests/a.py::one PASSED [ 50%]", "tests/a.py::two[x y] FAILED [100%]", "FAILED tests/a.py::two[x y]"]
    found = gpu_parts.outcomes(lines)
    assert found == {"passed": 1, "failed": 1, "skipped": 0, "printed": lines}
    assert gpu_parts.outcomes(["No module named pytest"])["error"] == "pytest ran no test: No module named pytest"


def test_without_optional_packages() -> None:
    """With torch, Lightning and transformers alone, ``import lt_tiled`` and the command work but for ZeRO-3."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2] == "ZeRO-3", done.stdout
