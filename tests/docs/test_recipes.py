"""The predictions on the page of recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lt_tiled.cli import main
from tests.docs.documents import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = re.findall(r"^\| .+ \| (\d+) x (\d+ GB) \| (.+) \| (\d+) GiB \| `(.+\.yaml)` \|$", PAGE, flags=re.MULTILINE)
"""GPUs, the memory of each, the peak, GiB of CPU memory for a node, the file."""


@pytest.mark.table(".*24gb.*")
@pytest.mark.parametrize(("gpus", "memory", "peak", "cpu", "file"), RECIPES, ids=[recipe[-1] for recipe in RECIPES])
def test_predictions(
    gpus: str, memory: str, peak: str, cpu: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prediction for a recipe has the peak of its row, fits into its GPUs, and what it offloads into a node."""
    Path("configs").symlink_to(ROOT / "configs")
    main(["plan", "--config", f"configs/recipes/{file}", "--memory", memory])
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"predicted peak of a rank {peak} " in printed
    assert "It fits into" in printed
    (offloaded,) = re.findall(r"Offloaded: (\S+) GiB to CPU memory", printed)
    assert float(offloaded) * min(int(gpus), 8) < int(cpu) + 1


def test_every_recipe_is_on_the_page() -> None:
    """The table of the page has each file of ``configs/recipes``, once."""
    assert sorted(recipe[-1] for recipe in RECIPES) == sorted(f.name for f in (ROOT / "configs/recipes").glob("*.yaml"))
