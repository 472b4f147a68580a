"""The map of the package in the documentation."""

from __future__ import annotations

import re

from tests.docs.documents import ROOT

PACKAGE = ROOT / "lt_tiled"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAP = re.search(r"^## Map$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
NOTES = re.findall(r"^\| `NOTE (\[.+?\])` \| `(.+?)` \|", PAGE, re.MULTILINE)


def test_the_map_is_complete() -> None:
    """The first column of the map names each module of the package once, and nothing else."""
    assert MAP is not None
    rows = re.findall(r"^\| (`.+?) \|", MAP[1], re.MULTILINE)
    named = [path for row in rows for path in re.findall(r"`(.+?)`", row)]
    modules = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    assert sorted(named) == sorted(path for path in modules if not path.endswith(("__init__.py", "__main__.py")))


def test_paths_in_the_text_exist() -> None:
    """Each path that the page names is a file or a folder of the package or of the repository."""
    paths = [path for path in re.findall(r"`([\w./]+(?:\.py|\.md|/))`", PAGE) if path != "lt_tiled/"]
    assert paths
    missing = [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert not missing


def test_the_notes_are_where_the_page_says() -> None:
    """Each note of the code is in the page's table, with the file that has it."""
    found = {
        (title, path.relative_to(PACKAGE).as_posix())
        for path in PACKAGE.rglob("*.py")
        for title in re.findall(r"^NOTE (\[.+?\])$", path.read_text(), re.MULTILINE)
    }
    assert found == set(NOTES)
