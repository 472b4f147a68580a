"""The messages that the troubleshooting page quotes."""

from __future__ import annotations

import ast
import re

from tests.docs.documents import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"


def text_of(node: ast.AST) -> str | None:
    """Return a string as it is written, with an ellipsis for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "…" for value in node.values)
    return None


def test_quoted_messages_are_ours() -> None:
    """Each message that the page quotes (code with a space, behind "Message:") is a string of the package."""
    quoted = re.findall(r"^Message: `(.+?)`", PAGE.read_text(), re.MULTILINE)
    assert len(quoted) >= 8
    nodes = [n for path in (ROOT / "lt_tiled").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    strings = [text for node in nodes if (text := text_of(node))]
    for quote in quoted:
        parts = [re.escape(part.strip()) for part in quote.split("…")]
        assert any(re.search(".*".join(parts), text, re.DOTALL) for text in strings), quote
