"""The API pages and the public names."""

from __future__ import annotations

import re
from pydoc import locate

import lt_tiled
from tests.docs.documents import ROOT

PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
DOCUMENTED = set(re.findall(r"^\.\. auto(?:class|exception|function|module):: (\S+)$", PAGES, re.MULTILINE))


def test_every_public_name_is_on_a_page() -> None:
    """Each name of ``lt_tiled`` and of its modules for strategies and callbacks is documented on a page of the API."""
    names = {f"lt_tiled.{name}" for name in lt_tiled.__all__}
    for module in (lt_tiled.callbacks, lt_tiled.fabric):
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert names <= DOCUMENTED


def test_every_documented_name_is_there() -> None:
    """Each name on a page of the API can be imported."""
    for name in sorted(DOCUMENTED):
        assert locate(name) is not None, name
