"""What the benchmarks say of lt_tiled holds, and the pages name commands that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import correctness, costs, gpu, harness, loss, models, peers, sequence_parallel
from benchmarks.__main__ import SECTIONS
from benchmarks.harness import CPU, Options, Size, Table
from tests.world import World

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUICK = Options(quick=True)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure lt_tiled and DeepSpeed, which the tests have installed."""
    for name in set(peers.MAKERS) - {"lt_tiled", "DeepSpeed"}:
        monkeypatch.delitem(peers.MAKERS, name)


def column(table: Table, name: str) -> list[str]:
    return [row[table.headings.index(name)] for row in table.rows]


@pytest.mark.self_checks
def test_correctness() -> None:
    """lt_tiled is right in every case, and cases tell right from wrong: DeepSpeed has both."""
    (table,) = correctness.correctness(QUICK)
    assert len(table.rows) >= 20
    assert {cell[0] for cell in column(table, "lt_tiled")} == {"✓"}
    assert {cell[0] for cell in column(table, "DeepSpeed")} == {"✓", "✗"}


def test_costs() -> None:
    """A checkpointed step in tiles has the FLOPs of the one without, and a lower peak; DeepSpeed's has more FLOPs."""
    size = Size(tokens=512, hidden=64, intermediate=256, layers=2, shards=8)
    model, ids = harness.llama(size), harness.draw(size)
    counts: dict[str, Any] = {"untiled": costs.counted(model, "untiled", None, 8, ids)}
    for name, tile in peers.tiles().items():
        counts[name] = costs.counted(model, name, tile, 8, ids)
    flops, peak = counts["untiled"]
    assert counts["lt_tiled"][0] == pytest.approx(flops, rel=0.005)
    assert counts["DeepSpeed"][0] > 1.1 * flops
    assert counts["lt_tiled"][1] < 0.9 * min(peak, counts["DeepSpeed"][1] / 0.9)


def test_step_without_the_comparison() -> None:
    """A step is timed with the comparison and without it."""
    size = Size(tokens=32, hidden=64, intermediate=128, layers=1, shards=2)
    with costs.with_checkpointing(harness.llama(size), costs.UNCOMPARED, None, 2) as model:
        step = harness.step_of(model, harness.draw(size))
        times = harness.interleaved(
            {"with": step, "without": lambda: costs.uncompared(step)}, 1, harness.host_seconds_of
        )
    assert min(harness.compared(times, "with", "without")[0], *times["with"]) > 0


def test_loss() -> None:
    """The gradients of lt_tiled's loss are right in every case, and DeepSpeed's are not where the loss is scaled."""
    table = loss.errors({"lt_tiled": loss.lt_tiled(), "DeepSpeed": loss.deepspeed()}, CPU)
    ours, theirs = ([cell[0] for cell in row[1:]] for row in table.rows)
    assert ours == 4 * ["✓"]
    assert theirs == ["✓", "✓", "✓", "✗"]


def test_missing_packages() -> None:
    """What cannot be imported is named with the reason, and an error of a package becomes a cell."""

    def missing() -> int:
        raise ImportError("No module named 'triton'")

    assert harness.usable({"Liger": missing}) == ({}, " Not measured: Liger (No module named 'triton').")
    assert harness.judged(harness.attempt(missing), 1.0) == "✗ raises ImportError"


@pytest.mark.full
def test_sequence_parallel() -> None:
    """lt_tiled has the loss and the gradients of one process for packed documents, and DeepSpeed has not."""
    ranks = World(2)  # of its own: DeepSpeed's groups stay in a process
    try:
        for system, mark in (("lt_tiled", "✓"), ("DeepSpeed, ZeRO-3", "✗ loss")):
            found = ranks(sequence_parallel.errors, system, "packed documents")
            assert sequence_parallel.judged(found).startswith(mark)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("llama", "right", "off by"),
        ("bloom", "refused", "cannot run on a part of its tokens"),
        ("gemma4_assistant", "cannot be built", "hidden_size_per_layer_input must be 0"),
    ],
)
def test_models(name: str, outcome: str, reason: str, world: World) -> None:
    """A model is right, refused with the message that users see, or cannot be built."""
    for found in world(models.examine, name):
        assert found[0] == outcome
        assert reason in found[1]


def with_wrong_gradient(name: str) -> tuple[str, str]:
    """Return the verdict on a model of which one gradient of the shared step is off by a millionth."""

    def shared_step(model: Any, inputs: Any) -> Any:
        found = step(model, inputs)
        last = list(found)[-1]
        return found | {last: found[last] * (1 + 1e-6)}

    step = models.shared_step
    models.shared_step = shared_step
    try:
        return models.examine(name)
    finally:
        models.shared_step = step


def test_wrong_gradient(world: World) -> None:
    """One gradient that is off by a millionth makes a model wrong."""
    assert {outcome for outcome, _ in world(with_wrong_gradient, "llama")} == {"wrong"}


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the command runs its benchmarks at small sizes. A command that fails or hangs is named."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "BENCHMARKS", ["-c", "raise SystemExit('--quick')"])
    with pytest.raises(SystemExit, match="failed"):
        gpu.main()
    monkeypatch.setattr(gpu, "BENCHMARKS", ["-c", "import time; time.sleep(1000)"])
    with pytest.raises(SystemExit, match="had no more than"):
        gpu.main()


def test_pages_name_commands() -> None:
    """Each benchmark that a page names can be run."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = " ".join(" ".join(page.read_text().split()) for page in pages)
    named = {name for names in re.findall(r"benchmarks --only ((?:[a-z_]+ ?)+)", text) for name in names.split()}
    assert named - {"and"} <= set(SECTIONS)
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_command() -> None:
    """The command prints the tables of the benchmarks that are named."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", "costs"], cwd=ROOT, capture_output=True, text=True
    )
    assert "| Mixtral, lt_tiled " in done.stdout
