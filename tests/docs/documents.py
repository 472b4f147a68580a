"""The documents, and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "sh", "yaml")
"""Languages of blocks that are run or parsed."""
SHOWN = ("text", "console")
"""Languages of blocks that show what is printed."""

_HIDDEN = re.compile(r"<!--\s*(?:file:\s*(?P<file>\S+)|(?P<language>python|sh))[ \t]*\n(?P<code>.*?)-->", re.DOTALL)
_NAMES = re.compile(r"<!--\s*file:\s*(\S+)\s*-->")
_OUTPUT = re.compile(r"<!--\s*output\s*-->")


@dataclass(frozen=True)
class Block:
    """One code block, or a comment that readers do not see: ``<!-- python`` and code up to ``-->``."""

    language: str
    code: str
    line: int
    """Of the document, from 1, where the code begins."""
    file: str | None = None
    """The name to save it under: a comment ``<!-- file: train.py -->`` stands before the block, or begins with that and
    holds the file."""
    output: bool = False
    """Whether commands have to print it: a comment ``<!-- output -->`` stands before."""


def tokens(document: Path) -> list[Token]:
    """The document as markdown-it's tokens."""
    return MarkdownIt("commonmark").enable("table").parse(document.read_text())


def blocks(document: Path) -> list[Block]:
    """The code blocks of a document in their order, without Sphinx's directives."""
    found: list[Block] = []
    before = ""
    for token in tokens(document):
        line = token.map[0] + 2 if token.map else 0
        if token.type in ("fence", "code_block") and not token.info.startswith("{"):
            name = _NAMES.fullmatch(before)
            output = _OUTPUT.fullmatch(before) is not None
            found.append(Block(token.info.strip(), token.content, line, name[1] if name else None, output))
        elif token.type == "html_block" and (hidden := _HIDDEN.fullmatch(token.content.strip())):
            found.append(Block(hidden["language"] or "", hidden["code"], line, hidden["file"]))
        before = token.content.strip() if token.type == "html_block" else ""
    return found


def script(parts: Iterable[Block]) -> str:
    """The code of several blocks, each on the lines where it stands in its document."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def having(language: str) -> list[Path]:
    """The documents with blocks in a language that are not files of their own."""
    return [d for d in DOCUMENTS if any(b.language == language and b.file is None for b in blocks(d))]


def name_of(document: Path) -> str:
    """What a test calls a document."""
    return document.relative_to(ROOT).with_suffix("").as_posix()
