"""What the README and the pages link to."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, name_of, tokens


def anchors(document: Path) -> set[str]:
    """Return what headings are called in addresses."""
    found = tokens(document)
    titles = [after.content for token, after in pairwise(found) if token.type == "heading_open"]
    return {*map(slug, titles)}


def slug(title: str) -> str:
    """Return what a heading is called in addresses."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    """Each link and image that is not of the web is a file of the repository, each heading it names exists, and so does
    each file that the text names.
    """
    inline = [child for token in tokens(document) for child in token.children or []]
    for child in inline:
        target = str(child.attrs.get("href") or child.attrs.get("src") or "")
        path, _, heading = target.partition("#")
        named = re.findall(r"\b(?:tests|examples|configs|lt_tiled)/[\w/]+\.\w+", child.content)
        assert all((ROOT / name).exists() for name in named), child.content
        if not target or "://" in target:
            continue
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not heading or heading in anchors(file), target
