"""The predictions that the recipes print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lt_tiled.cli import main
from tests.docs.documents import ROOT, Block, blocks
from tests.docs.test_links import slug

pytestmark = pytest.mark.slow

PAGES = [ROOT / "docs" / "recipes" / name for name in ("llama_8b.md", "large_models.md")]
RECIPES = [
    (page, before, after)
    for page in PAGES
    for before, after in zip(blocks(page), blocks(page)[1:], strict=False)
    if before.direction == "recipe"
]


def plain(text: str) -> str:
    """Return text without the lines of tables, on one line."""
    return re.sub(r"[\s│]+", " ", text).strip()


def row(page: Path, command: Block) -> str:
    """Return the row of the index that links to the section of a command."""
    headings = [line for line in page.read_text().splitlines()[: command.line] if line.startswith("## ")]
    link = f"({page.name}#{slug(headings[-1].removeprefix('## '))})"
    (found,) = (line for line in (page.parent / "index.md").read_text().splitlines() if link in line)
    return found


@pytest.mark.table(".*24gb.*")
@pytest.mark.parametrize(("page", "command", "printed"), RECIPES, ids=[plain(c.code)[:72] for _, c, _ in RECIPES])
def test_predictions(page: Path, command: Block, printed: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe's command prints its lines with these figures, for the complete model, and its row of the index has the
    peak.
    """
    Path("configs").symlink_to(ROOT / "configs")
    main(shlex.split(command.code)[1:])
    output = plain(capsys.readouterr().out)
    lines = printed.code.splitlines()
    for line in lines:
        assert plain(line) in output
    assert "It fits into" in output
    peak = lines[0].removeprefix("predicted peak of a rank ")
    assert f"| {peak} |" in row(page, command)


def test_every_recipe_has_a_section() -> None:
    """Each configuration of ``configs/recipes`` is in a recipe that has its prediction."""
    files = {f"configs/recipes/{file.name}" for file in (ROOT / "configs" / "recipes").glob("*.yaml")}
    words = {word for _, command, _ in RECIPES for word in command.code.split()}
    assert files == {word for word in words if word.startswith("configs/recipes/")}
