"""The documents and the code blocks in them.

HTML comments, which readers do not see, say what a test does with a block:

* ``<!-- python`` and code up to ``-->``: code that runs before the blocks that follow, such as the reader's model;
* ``<!-- file: train.py -->`` before a block: save the block under that name instead of running it;
* ``<!-- output -->`` before a block: the commands of the document print its lines, except for numbers;
* ``<!-- recipe -->`` before a block: test_recipes.py runs it;
* ``<!-- test: --seq=4096 -->`` before a block: add these arguments to each of its ``lt-tiled`` commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_HIDDEN = re.compile(r"<!--\s*python[ \t]*\n(.*?)-->", re.DOTALL)
_DIRECTION = re.compile(r"<!--\s*(file|output|recipe|test)(?::\s*(.*?))?\s*-->")


@dataclass(frozen=True)
class Block:
    """One code block, with the HTML comment before it."""

    language: str
    code: str
    line: int
    direction: str = ""
    argument: str = ""

    @property
    def runs(self) -> bool:
        return self.direction not in ("file", "output", "recipe") and self.language != "text"


def name_of(document: Path) -> str:
    """Return what a test calls a document."""
    return document.relative_to(ROOT).with_suffix("").as_posix()


def tokens(document: Path) -> list[Token]:
    """Parse a document."""
    return MarkdownIt("commonmark").enable("table").parse(document.read_text())


def blocks(document: Path) -> list[Block]:
    """Return the code blocks of a document in their order, without Sphinx's directives."""
    found: list[Block] = []
    comment = ""
    for token in tokens(document):
        line = token.map[0] + 2 if token.map else 0
        if token.type in ("fence", "code_block") and not token.info.startswith("{"):
            direction = _DIRECTION.fullmatch(comment)
            found.append(Block(token.info.strip(), token.content, line, *(direction.groups("") if direction else ())))
        comment = token.content.strip() if token.type == "html_block" else ""
        if hidden := _HIDDEN.fullmatch(comment):
            found.append(Block("python", hidden[1], line))
    return found
