"""The troubleshooting page and the messages of the package."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.documents import ROOT, tokens

PAGE = ROOT / "docs" / "troubleshooting.md"
ENOUGH = 11
"""A message with fewer letters of its own is made of another one."""
WARNINGS = ("warn", "warn_once", "_tell_once")


def text_of(node: ast.AST) -> str | None:
    """A string as it is written, with an ellipsis for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "…" for value in node.values)
    return None


def own_letters(text: str) -> int:
    return len(re.findall(r"\w", text))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted((ROOT / "lt_tiled").rglob("*.py"))}


@cache
def strings() -> list[str]:
    """Every string of the package."""
    return [text for tree in trees().values() for node in ast.walk(tree) if (text := text_of(node))]


def messages() -> dict[str, str]:
    """What the package raises and warns, by where it does."""
    found = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            if isinstance(node, ast.Raise) or name in WARNINGS:
                text = max((text_of(argument) or "" for argument in call.args), key=own_letters, default="")
                if own_letters(text) >= ENOUGH:
                    found[f"{path}:{call.lineno}"] = text
    return found


def quoted() -> list[str]:
    """The messages on the page: what begins an item of a list as code."""
    found, items = [], 0
    for token in tokens(PAGE):
        items += {"list_item_open": 1, "list_item_close": -1}.get(token.type, 0)
        if items and token.type == "inline" and token.children and token.children[0].type == "code_inline":
            found.append(token.children[0].content)
    return found


def says(quote: str, message: str) -> bool:
    """Whether a quote's words stand in a message, in their order."""
    at = 0
    for part in quote.split("…"):
        at = message.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


def test_quoted_messages_are_ours() -> None:
    """Each message on the page stands in the package, word for word but for what differs."""
    short = [quote for quote in quoted() if own_letters(quote) < ENOUGH]
    assert not short
    assert not [quote for quote in quoted() if not any(says(quote, text) for text in strings())]


def test_every_message_is_on_the_page() -> None:
    """Each message that the package raises or warns is on the page, with its cause and what to do."""
    known = quoted()
    assert not {place: text for place, text in messages().items() if not any(says(quote, text) for quote in known)}
