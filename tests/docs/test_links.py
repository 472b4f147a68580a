"""What the README and the pages link to."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, name_of, tokens


def targets(document: Path) -> list[str]:
    """The addresses of a document's links and images."""
    inline = [child for token in tokens(document) for child in token.children or []]
    return [
        str(child.attrs.get("href") or child.attrs.get("src"))
        for child in inline
        if child.type in ("link_open", "image")
    ]


def anchors(document: Path) -> set[str]:
    """What headings are called in addresses."""
    found = tokens(document)
    titles = [after.content for token, after in pairwise(found) if token.type == "heading_open"]
    return {"".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_") for title in titles}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    """Each link and image of a document that is not of the web is a file of the repository, and each heading it names
    is there.
    """
    for target in targets(document):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not heading or heading in anchors(file), target
