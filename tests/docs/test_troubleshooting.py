"""The messages that the troubleshooting page quotes."""

from __future__ import annotations

import ast
import re

from tests.docs.documents import ROOT


def text_of(node: ast.AST) -> str:
    """Return a string as it is written, with an ellipsis for each value in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "…" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_quoted_messages_are_ours() -> None:
    """Each message that the page quotes is a string of the package, except for the values in it."""
    quoted = re.findall(r"^Message: `(.+?)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert quoted
    nodes = [n for path in (ROOT / "lt_tiled").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    strings = [text for node in nodes if (text := text_of(node))]
    for quote in quoted:
        pattern = ".*".join(re.escape(part.strip()) for part in quote.split("…"))
        assert any(re.search(pattern, text, re.DOTALL) for text in strings), quote
