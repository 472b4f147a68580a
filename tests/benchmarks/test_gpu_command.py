"""``python -m benchmarks.gpu``: its parts at a tiny size on the CPU, its goals, and what it says of failures."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts, peers
from lt_tiled.lm import CausalLM
from tests.processes import LIMIT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MISSING = ("deepspeed", "peft", "jsonargparse", "matplotlib", "rich", "tensorboard", "torchao")
PROGRAM = """
import json, math, lt_tiled
from benchmarks import gpu, gpu_parts
gpu_parts.PARTS["peak"] = lambda setup: iter([*gpu_parts.peak(setup)][-1:])
print(json.dumps([[part, *row] for part in ("peak", "engines") for row in gpu.in_this_process(part, math.inf, True)]))
"""


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


def test_no_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a part whose time is over do not begin, and say so; so do the goals."""
    monkeypatch.setattr(gpu_parts, "PARTS", {"offload": lambda setup: iter([("32768 tokens", pytest.fail)])})
    found = dict(gpu.in_this_process("offload", 0, False))
    assert found == {"32768 tokens": {"missing": "no time left"}}
    goals = gpu.goals(results(offload=found))
    assert goals.rows[1][2].text == "not measured: no time left"
    assert gpu.run(["offload"], 0, False, tmp_path / "gpu.json")["found"] == {
        "offload": {"offload": {"missing": "no time left"}}
    }


def test_tiny_sizes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part ``tiny`` has the rows of all others, at the tiny size, whatever the size of the run."""
    seen: list[Any] = []

    def part(setup: gpu_parts.Setup) -> gpu_parts.Rows:
        yield "row", lambda: seen.append((setup.tiny, setup.left())) or {"step [s]": 1.0}

    monkeypatch.setattr(gpu_parts, "PARTS", {"tiny": gpu_parts.tiny, "offload": part, "peak": part})
    found = dict(gpu.in_this_process("tiny", math.inf, False))
    assert found == {"offload: row": {"step [s]": 1.0}, "peak: row": {"step [s]": 1.0}}
    assert seen == [(True, 0.0)] * 2


def test_nothing_is_copied_after_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and optimizer state are gone when Lightning's teardown moves a model to the CPU."""
    models: list[CausalLM] = []
    monkeypatch.setattr(CausalLM, "cpu", lambda model: models.append(model) or model)
    setup = gpu_parts.Setup(True, math.inf, torch.device("cpu"))
    watch = gpu_parts.fit(setup, gpu_parts.TiledSingleDeviceStrategy(), 4096)
    (model,) = models
    assert math.isfinite(watch.loss)
    assert not any(weight.numel() or weight.grad is not None for weight in model.parameters())
    assert not model.trainer.optimizers[0].state


@pytest.mark.parametrize(("left", "share", "rounds"), [(1e9, 1.0, 9), (1e9, 0.0, 3), (0.0, 1.0, 1)])
def test_rounds(left: float, share: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are timed in nine rounds, in three if these take the share of the time, in one if the part's time is over,
    after one that warms up; the ways take turns.
    """
    calls: list[str] = []
    setup = gpu_parts.Setup(False, time.monotonic() + left, torch.device("cpu"))
    times = setup.timed({name: lambda name=name: float(calls.append(name) or 1) for name in "ab"}, share)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": rounds, "b": rounds}
    assert calls == [*"baab" * 5][: 2 * rounds + 2]


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """lt_tiled is timed next to the untiled step, then on the host. A missing package is named with the reason."""
    everyone = [peers.Peer("lt_tiled", gpu_parts.prepare), peers.Peer("Liger", None, "No module named 'triton'")]
    monkeypatch.setattr(gpu_parts, "peers", lambda: everyone)
    found = dict(gpu.in_this_process("steps", math.inf, True))
    assert [*found] == ["lt_tiled", "Liger", "lt_tiled, host"]
    assert (found["lt_tiled"]["rounds"], found["lt_tiled"]["relative step time"] > 0) == (1, True)
    assert [*found["lt_tiled, host"]] == ["host time of one tile more [µs]"]
    assert gpu.text(found["Liger"]) == "not measured: No module named 'triton'"


@pytest.mark.full
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
    assert found["engines", "FSDP2, + block inputs in CPU memory"]["relative loss"] == pytest.approx(1, abs=1e-3)
    assert found["engines", "ZeRO-3, activation checkpointing"] == {"missing": "No module named 'deepspeed'"}
    assert "predicted over measured" in found["peak", "+ block inputs in CPU memory, 65536 tokens"]


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
        (0, counted(0, 30)),
        (0, counted(9, 0, error="ended with code -9")),
        (0, counted(9, 1, missing="no time left")),
        (1, stepped("offload", "32768 tokens", 1.07)),
        (2, stepped("offload", "131072 tokens", 1.02)),
        (3, {"peak": {"plain": {"predicted over measured": 1.01}, "last": {"predicted over measured": 0.94}}}),
        (3, {"peak": {"plain": {"predicted over measured": 0.9}, "last": LATE}}),
        (4, {"engines": {"FSDP2": {"relative loss": 1.02}}}),
        (4, {"engines": {"FSDP2": {"relative loss": math.nan}, "ZeRO-3": {"relative loss": 1.0}}}),
        (4, {"engines": {"FSDP2": {"relative loss": 1.0}, "ZeRO-3": {"relative loss": math.nan}}}),
        (5, stepped("steps", "lt_tiled", 1.2, Liger=LIGER)),
        (6, {"compiled": {"compiled": {"error": "RuntimeError: no"}}}),
    ],
)
def test_goals(index: int, changed: dict[str, Any]) -> None:
    """Each goal is reached by figures within its bound, and missed by one beyond it."""
    assert verdicts() == [True] * 7
    assert verdicts(**changed)[index] is False


def test_goals_that_were_not_measured() -> None:
    """A goal without a figure has no verdict, and one without other packages says so, and why each is missing."""
    steps = stepped("steps", "lt_tiled", 1.0, Liger={"missing": "No module named 'liger_kernel'"})
    rows = gpu.goals(results(offload={}, **steps)).rows
    assert [row[2].good for row in rows] == [True, None, None, True, True, None, True]
    assert rows[5][1].text == "below all others (Liger not measured: No module named 'liger_kernel')"
    assert rows[5][2].text == "not measured: no other package was measured"


@pytest.mark.parametrize(
    ("index", "changed", "text"),
    [
        (0, counted(9, 0, missing="no time left"), "9 passed, 0 failed, no time left"),
        (2, stepped("offload", "131072 tokens", 1.002, rounds=2), "1.002 (2 rounds)"),
        (3, {"peak": {"plain": {"predicted over measured": 0.98}, "last": NO_MEMORY}}, "0.980 (1 of 2 rows)"),
        (4, {"engines": {"FSDP2": LATE, "ZeRO-3": {"missing": "No module named 'deepspeed'"}}}, "0.995 (2 of 3 rows)"),
        (5, stepped("steps", "lt_tiled", 1.02, rounds=1, Liger=LIGER), "1.020 (1 rounds)"),
    ],
)
def test_goals_that_were_measured_in_part(index: int, changed: dict[str, Any], text: str) -> None:
    """A figure that rests on part of the tests, rows or rounds says so, and has no verdict."""
    cell = gpu.goals(results(**changed)).rows[index][2]
    assert (cell.text, cell.good) == (text, None)


def test_a_package_that_raises() -> None:
    """A package whose steps raised is named next to those that lt_tiled is compared to."""
    steps = stepped("steps", "lt_tiled", 1.0, Liger=LIGER, verl={"error": "RuntimeError: no"})
    goal = gpu.goals(results(**steps)).rows[5]
    assert goal[1].text == "below all others (Liger 1.100, verl not measured: RuntimeError: no)"
    assert (goal[2].text, goal[2].good) == ("1.000 (3 rounds)", True)


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
    assert files[:3] == ["tests/loss/test_functional.py", "tests/loss/test_gpu.py", "tests/offload/test_gpu.py"]
    compiling = [file for file in files if "compile" in (ROOT / file).read_text()]
    assert {"tests/lm/test_causal.py", "tests/tiling/test_modes.py"} <= {*compiling} < {*files}
    assert files[-len(compiling) :] == compiling


def test_outcomes() -> None:
    """The outcomes of tests are counted, what pytest printed of a failure is kept, and that one failed is no error."""
    lines = ["tests/a.py::one PASSED [ 50%]", "tests/a.py::two[x y] FAILED [100%]", "FAILED tests/a.py::two[x y]"]
    found = gpu.outcomes(lines, {"error": "ended with code 1"})
    assert found == {"passed": 1, "failed": 1, "skipped": 0, "printed": lines}
    none = gpu.outcomes(["No module named pytest"], {"error": "ended with code 1"})
    assert none["error"] == "pytest ran no test: No module named pytest"
    assert gpu.outcomes(lines[:1], {"error": "ended with code -9"})["error"] == "ended with code -9"
