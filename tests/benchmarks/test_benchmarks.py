"""What the benchmark says of lt_tiled holds, exactly where figures are exact; and it says who was not measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import ROOT, record, sheets_of, write
from benchmarks.alarms import CASES, train
from benchmarks.checks import step_of
from benchmarks.correctness import correctness, rounding
from benchmarks.costs import Size, costs
from benchmarks.experts import experts
from benchmarks.loss import candidates, errors, usable
from benchmarks.peers import Peer, peers, roll_call
from benchmarks.sequence_parallel import Worlds, exact_costs, gradients
from benchmarks.sheet import Sheet

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def everyone() -> list[Peer]:
    """lt_tiled and DeepSpeed, which the tests have installed."""
    return [peer for peer in peers() if peer.name in ("lt_tiled", "DeepSpeed")]


def verdicts(sheet: Sheet, name: str) -> list[bool | None]:
    """Of a column, or of a row where no column has the name."""
    if name in sheet.headings:
        return [row[sheet.headings.index(name)].good for row in sheet.rows]
    (row,) = [row for row in sheet.rows if row[0].text == name]
    return [cell.good for cell in row[1:]]


@pytest.mark.self_checks
def test_no_red_cell(everyone: list[Peer]) -> None:
    """In the correctness grid lt_tiled is right in every row, and rows tell right from wrong: DeepSpeed has both."""
    (sheet,) = correctness(everyone)
    assert len(sheet.rows) >= 20
    assert verdicts(sheet, "lt_tiled") == [True] * len(sheet.rows)
    assert set(verdicts(sheet, "DeepSpeed")) == {True, False}


def test_error_is_flat(everyone: list[Peer]) -> None:
    """From 1 to 512 tiles the error of lt_tiled's bfloat16 gradients stays within 1.5 times, where DeepSpeed's does
    not.
    """
    (sheet,) = rounding(everyone, CPU, (1, 64, 512))
    assert verdicts(sheet, "lt_tiled") == [True] * 3
    assert verdicts(sheet, "DeepSpeed") == [True, False, False]


def test_sums_of_experts() -> None:
    """With ``num_shards="auto"`` the gradient sums of released mixtures take at most 5 % of the arithmetic, and with
    ``ceil(tokens / hidden_size)`` tiles more.
    """
    (sheet,) = experts()
    assert verdicts(sheet, "of the arithmetic") == 3 * [False, True]


def test_flops(everyone: list[Peer]) -> None:
    """A checkpointed step in tiles has the untiled one's FLOPs and two forward passes of the MLP; DeepSpeed's has
    three.
    """
    (sheet,) = costs(everyone, Size(tokens=512, hidden=64, intermediate=256, layers=2, shards=8))
    untiled, ours, theirs = sheet.rows
    assert [cell.text for cell in ours[:4]] == ["lt_tiled", "1.00", "1.00", "2"]
    assert (untiled[3].text, theirs[2].text, theirs[3].text) == ("2", "1.36", "3")
    assert float(theirs[1].text) > 1.1
    assert float(ours[4].text) < 0.9


def test_loss_is_right() -> None:
    """In the grid of losses lt_tiled is right in every cell, and DeepSpeed's scaled gradients are not."""
    ways = usable({name: way for name, way in candidates(4).items() if name in ("lt_tiled", "DeepSpeed")}, CPU)
    sheet = errors(ways, CPU, 4)
    assert verdicts(sheet, "lt_tiled") == [True] * 7
    assert verdicts(sheet, "DeepSpeed")[2:4] == [False, False]


def test_rounding_is_no_alarm() -> None:
    """Recomputes that sum in another order are compared, and none is refused."""
    refused, (_, units, _) = train(CASES["bfloat16 weights, 4 of 8 experts"], 3)
    assert refused == 0
    assert units > 0


def test_steps_without_the_comparison() -> None:
    """A step is timed with the comparison and without it."""
    size = Size(tokens=32, hidden=64, intermediate=128, layers=1, shards=2)
    assert min(step_of(size, tiled=True)(), step_of(size, tiled=True, compared=False)()) > 0


def test_who_is_missing() -> None:
    """A peer that cannot be imported is a row that says why."""
    sheet = roll_call([Peer("Liger", None, "No module named 'triton'")])
    assert [cell.text for cell in sheet.rows[0]] == ["Liger", "not measured: No module named 'triton'"]


def test_page_has_results() -> None:
    """Each place for a table in the documentation holds one of a sheet that the benchmark makes."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    places = re.findall(r"<!-- benchmark: (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    source = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    assert len(places) >= 8
    for name, table in places:
        assert table.startswith("| "), name
        assert re.search(rf'Sheet\(\s*"{name}"', source), name


def test_markdown_and_json(tmp_path: Path) -> None:
    """A sheet goes between its comments and nowhere else, each time anew; the record names versions, seed and load."""
    sheet = Sheet("costs", "a title", ["", "FLOPs"], notes=["A note."])
    sheet.add("a|b", "1.00")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark: costs -->\nold\n<!-- end -->\n<!-- benchmark: other -->\n<!-- end -->\n")
    for _ in range(2):
        write(page, [sheet])
    assert page.read_text() == (
        "before\n<!-- benchmark: costs -->\n|  | FLOPs |\n| --- | --- |\n| a\\|b | 1.00 |\n\nA note.\n<!-- end -->\n"
        "<!-- benchmark: other -->\n<!-- end -->\n"
    )
    told = json.loads(json.dumps(record([sheet], quick=True)))
    assert told["versions"]["torch"] == torch.__version__
    assert {"seed", "load_at_the_end", "machine", "quick"} <= told.keys()
    assert sheets_of(told) == [sheet]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Ranks for each system."""
    with closing(Worlds()) as worlds:
        yield worlds


@pytest.mark.full
def test_sequence_parallelism_is_right(worlds: Worlds) -> None:
    """lt_tiled has the gradients of one process under every engine and mask; DeepSpeed under ZeRO-3, and neither twice
    as large nor for packed documents.
    """
    sheet = gradients(worlds, (2,), ["causal", "packed documents"])
    ours, theirs = ([h.startswith(name) for h in sheet.headings].index(True) for name in ("lt_tiled", "DeepSpeed"))
    for row in sheet.rows:
        assert [cell.good for cell in row[ours:theirs]] == [True] * 4
    causal, packed = (row[theirs:] for row in sheet.rows)
    assert [cell.text for cell in causal[1:3]] == ["x2.00"] * 2
    assert [cell.good for cell in causal] == [True, False, False, True]
    assert [cell.good for cell in packed] == [False] * 4


@pytest.mark.full
def test_sequence_parallelism_halves_memory(worlds: Worlds) -> None:
    """A step of two ranks has two all-to-alls for each layer forward and two backward, and half of the memory. On the
    host it has an all-gather for each layer and two more, which compare batches and blocks.
    """
    size = Size(tokens=512, hidden=128, intermediate=256, layers=2)
    sheet = exact_costs(worlds, size, (2,))
    found = {row[0].text: [cell.text for cell in row[1:]] for row in sheet.rows}
    assert found["lt_tiled"][:4] == ["8", "4", "0", "1"]
    assert found["lt_tiled, activation checkpointing"][0] == "12"
    assert found['lt_tiled, `keep="attention"`'][0] == "8"
    assert found["DeepSpeed"][:2] == ["16", "4"]
    assert float(found["lt_tiled"][4]) < 0.55
