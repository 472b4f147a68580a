"""The map of the package in the documentation."""

from __future__ import annotations

import re

from tests.docs.documents import ROOT

PACKAGE = ROOT / "lt_tiled"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATHS = set(re.findall(r"`([\w./]+(?:\.py|\.md|/))`", PAGE))


def test_the_map_is_complete() -> None:
    """The page names each folder and each file at the top of the package."""
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    files = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")} - {"_log.py"}
    assert folders | files <= PATHS


def test_paths_exist() -> None:
    """Each path that the page names is in the package, in one of its folders, or in the repository."""
    assert not [p for p in PATHS if not any(root.joinpath(p).exists() for root in (PACKAGE, ROOT, *PACKAGE.glob("*/")))]
