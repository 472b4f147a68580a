"""``python -m benchmarks.gpu``: its parts at a tiny size on the CPU, its goals, and what it says of failures."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts, peers
from tests.processes import LIMIT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure on the CPU, on a machine with a GPU, too."""
    monkeypatch.setattr(gpu, "device_at_hand", lambda: torch.device("cpu"))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def last(part: str) -> Callable[[gpu_parts.Setup], gpu_parts.Rows]:
    return lambda setup: iter([*gpu_parts.__dict__[part](setup)][-1:])


@pytest.mark.full
def test_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of each part runs on the CPU without an error and is written, and no figure of it is claimed."""
    parts = ["tiny", "offload", "longest", "compiled"]
    monkeypatch.setattr(gpu_parts, "PARTS", {part: last(part) for part in parts})
    results = gpu.run(parts, 600, False, tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text()) == results
    assert {name: list(rows) for name, rows in results["found"].items()} == {
        "offload": ["131072 tokens"],
        "longest": ["+ block inputs in CPU memory"],
        "compiled": ["CUDA graphs"],
    }
    assert not any({"error", "missing"} & row.keys() for rows in results["found"].values() for row in rows.values())
    assert results["found"]["offload"]["131072 tokens"]["cpu_bytes per step"] == 256 * 64 * 4
    goals, figures = gpu.sheets(results)
    assert {row[2].text for row in goals.rows} == {"not measured: no CUDA device"}
    assert {row[2].text for row in figures.rows} == {"ran; not measured: no CUDA device"}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    gpu.main()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints both tables of what it wrote, and ``--render`` writes them into the documentation."""
    monkeypatch.setattr(gpu_parts, "PARTS", {"steps": lambda setup: iter([("lt_tiled", dict)])})
    command(monkeypatch, "--only", "steps", "--json", str(tmp_path / "gpu.json"))
    printed, page = capsys.readouterr().out, tmp_path / "docs" / "page.md"
    assert "| parts of this command | no error | not measured: no CUDA device |" in printed
    assert "| steps | lt_tiled | ran; not measured: no CUDA device |" in printed
    page.parent.mkdir()
    page.write_text("".join(f"<!-- benchmark: gpu_{name} -->\n<!-- end -->\n" for name in ("goals", "figures")))
    monkeypatch.setattr("benchmarks.__main__.ROOT", tmp_path)
    command(monkeypatch, "--render", str(tmp_path / "gpu.json"))
    tables = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert tables == [line for line in printed.splitlines() if line.startswith("|")]


def test_a_run_that_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM ends the command with its tables, and the file has what was found and which rows and parts were not."""
    rows = [("32768 tokens", lambda: {"rounds": 3}), ("131072 tokens", lambda: os.kill(os.getpid(), signal.SIGTERM))]
    monkeypatch.setattr(gpu_parts, "PARTS", {"offload": lambda setup: iter(rows)})
    with pytest.raises(SystemExit, match="143"):
        command(monkeypatch, "--only", "offload", "steps", "--json", str(tmp_path / "gpu.json"))
    late = {"missing": "no time left"}
    found = json.loads((tmp_path / "gpu.json").read_text())["found"]
    assert found == {"offload": {"32768 tokens": {"rounds": 3}, "131072 tokens": late}, "steps": {"steps": late}}
    assert "| offload | 131072 tokens | not measured: no time left |" in capsys.readouterr().out


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """lt_tiled is timed next to the untiled step, then on the host. A missing package is named with the reason."""
    everyone = [peers.Peer("lt_tiled", gpu_parts.prepare), peers.Peer("Liger", None, "No module named 'triton'")]
    monkeypatch.setattr(gpu_parts, "peers", lambda: everyone)
    found = dict(gpu.in_this_process("steps", math.inf, True))
    assert [*found] == ["lt_tiled", "Liger", "lt_tiled, host"]
    assert (found["lt_tiled"]["rounds"], found["lt_tiled"]["relative step time"] > 0) == (1, True)
    assert [*found["lt_tiled, host"]] == ["host time of one tile more [µs]"]
    assert gpu.text(found["Liger"]) == "not measured: No module named 'triton'"


def results(**changed: Any) -> dict[str, Any]:
    """What a run on a GPU found that reached all goals, but for what is changed."""
    rows = {
        "tiny": {"peak: plain": {"predicted over measured": 3.0, "relative loss": 3.0}},
        "tests": {"pytest -m gpu": {"passed": 30, "failed": 0, "skipped": 0}},
        "offload": {f"{n} tokens": {"relative step time": 1.005, "rounds": 3} for n in (8192, 32768, 131072)},
        "peak": {"plain": {"predicted over measured": 0.98, "relative loss": 1.0}},
        "compiled": {"compiled": {"relative loss": 0.995}},
        "steps": {"lt_tiled": {"relative step time": 1.02, "rounds": 3}, "Liger": {"relative step time": 1.1}},
    }
    found = {**rows, **changed}
    return {"found": found, "reason": "", "versions": {}, "machine": "a GPU", "python": "3.12"}


def verdicts(**changed: Any) -> list[bool | None]:
    return [row[2].good for row in gpu.goals(results(**changed)).rows]


def counted(passed: int, failed: int, **more: str) -> dict[str, Any]:
    """What pytest found."""
    return {"tests": {"pytest -m gpu": {"passed": passed, "failed": failed, "skipped": 0, **more}}}


def stepped(part: str, row: str, time: float, rounds: int = 3, **others: Any) -> dict[str, Any]:
    """How long the steps of a row took, relative to the untiled ones."""
    return {part: {row: {"relative step time": time, "rounds": rounds}, **others}}


LIGER = {"relative step time": 1.1}
LATE, NO_MEMORY = {"missing": "no time left"}, {"error": "OutOfMemoryError: no"}


@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, counted(29, 1)),
        (0, counted(9, 0, error="ended with code -9")),
        (1, stepped("offload", "32768 tokens", 1.07)),
        (2, stepped("offload", "131072 tokens", 1.02)),
        (3, {"peak": {"plain": {"predicted over measured": 1.01}, "last": {"predicted over measured": 0.94}}}),
        (4, {"engines": {"FSDP2": {"relative loss": 1.02}}}),
        (4, {"engines": {"FSDP2": {"relative loss": math.nan}, "ZeRO-3": {"relative loss": 1.0}}}),
        (5, stepped("steps", "lt_tiled", 1.2, Liger=LIGER)),
        (6, {"compiled": {"compiled": {"error": "RuntimeError: no"}}}),
    ],
)
def test_goals(index: int, changed: dict[str, Any]) -> None:
    """Each goal is reached by figures within its bound, and missed by one beyond it."""
    assert verdicts() == [True] * 7
    assert verdicts(**changed)[index] is False


@pytest.mark.parametrize(
    ("index", "changed", "text"),
    [
        (0, counted(9, 0, missing="no time left"), "9 passed, 0 failed, no time left"),
        (2, stepped("offload", "131072 tokens", 1.002, rounds=2), "1.002 (2 rounds)"),
        (3, {"peak": {"plain": {"predicted over measured": 0.98}, "last": NO_MEMORY}}, "0.980 (1 of 2 rows)"),
        (4, {"engines": {"FSDP2": LATE, "ZeRO-3": {"missing": "No module named 'deepspeed'"}}}, "0.995 (2 of 3 rows)"),
        (5, stepped("steps", "lt_tiled", 1.02, rounds=1, Liger=LIGER), "1.020 (1 rounds)"),
        (2, {"offload": {}}, "not measured: it did not run"),
        (5, stepped("steps", "lt_tiled", 1.0), "not measured: no other package was measured"),
    ],
)
def test_goals_that_were_measured_in_part(index: int, changed: dict[str, Any], text: str) -> None:
    """A figure that rests on part of the tests, rows or rounds says so, and has no verdict."""
    cell = gpu.goals(results(**changed)).rows[index][2]
    assert (cell.text, cell.good) == (text, None)


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let a script take the place of Python."""
    file = folder / "python"
    file.write_text("\n".join(["#!/bin/bash", *lines]))
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_a_part_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part found before its process died is kept, next to how it ended and what it printed. It was given the
    time at which it is killed, less some for its last row.
    """
    row, end = json.dumps(["first", {"step [s]": 1.0}]), time.monotonic() + 600
    script(tmp_path, monkeypatch, "echo $@", f"echo '{row}' >> ${{@: -1}}", "kill -9 $$")
    first, (name, figures) = gpu.own_process("offload", end, False)
    assert first == ("first", {"step [s]": 1.0})
    assert (name, figures["error"]) == ("offload", "ended with code -9")
    assert f"--part offload --end {end - 15} --json" in figures["printed"][0]


def test_a_part_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that does not end is killed when its time is over, which is no error."""
    script(tmp_path, monkeypatch, "sleep 1000")
    ((name, figures),) = gpu.own_process("offload", time.monotonic(), False)
    assert (name, figures["missing"]) == ("offload", "no time left: cut off after 0 s")
    cell = gpu.goals(results(offload={name: figures})).rows[6][2]
    assert (cell.text, cell.good) == ("none; not finished: offload", True)


def test_tests_that_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tests that do not end in time, the outcomes so far are known: while they run, and at the end. Those of the
    loss and of offloading come first, and those that compile last.
    """
    lines = "tests/a.py::one PASSED [ 33%]", "tests/a.py::two FAILED [ 66%]"
    script(tmp_path, monkeypatch, *(f"echo '{line}'" for line in lines), "echo $@", "sleep 1000")
    rows = gpu.run_tests("tests", time.monotonic() + LIMIT, False)
    counts = next(row for _, row in rows if row["failed"])
    assert (counts["passed"], counts["failed"], counts["missing"]) == (1, 1, "no time left")
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: math.inf, sleep=time.sleep))  # its end has come
    *_, (_, counts) = rows
    assert (counts["passed"], counts["failed"], "cut off" in counts["missing"]) == (1, 1, True)
    files = [word for word in counts["printed"][-1].split() if word.startswith("tests/")]
    assert files[:3] == ["tests/loss/test_functional.py", "tests/loss/test_gpu.py", "tests/offload/test_blocks.py"]
    compiling = [file for file in files if "compile" in (ROOT / file).read_text()]
    assert {"tests/lm/test_causal.py", "tests/tiling/test_modes.py"} <= {*compiling} < {*files}
    assert files[-len(compiling) :] == compiling
