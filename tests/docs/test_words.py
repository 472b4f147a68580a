"""The pages, configurations, messages and docstrings use the words of the field."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

FOLDERS = ("docs", "lt_tiled", "configs", "examples", "benchmarks")
FILES = [
    *sorted(ROOT.glob("*.md")),
    *(f for folder in FOLDERS for kind in ("md", "py", "yaml") for f in sorted((ROOT / folder).rglob(f"*.{kind}"))),
]
WORDS = {
    r"checkpointed (block|model|layer|module)s?": "activation checkpointing",
    r"(?<!gradient )(?<!activation )checkpointing (of|the) blocks?": "activation checkpointing",
    r"(is|are|was|were|be) held(?! out)|stands? there": "activation memory",
    r"(run|runs|ran|running) (it |them |it all )?(a second time|backward)": "recompute, backward pass",
    r"RAM|page-locked|waits? elsewhere": "CPU memory, pinned memory",
    r"boundary|boundaries": "block input",
    r"(feed-forward|wide) parts?": "MLP",
    r"(larger|hidden|inner|intermediate) width|widths?(?= of the)|vocabulary words": "hidden_size, intermediate_size",
    r"token-?wise": "per-token, position-wise",
    r"(is|are|a|the) mark(s|ed)?|marking|puts? (it |them )?back": "patch, restore",
    r"(?<!all-)gathers": "all-gather",
    r"(?<!FSDP )units": "FSDP unit",
    r"packs": "saved tensors",
    r"whole logits": "full logits",
    r"untiled one'?s?|than untiled|over the untiled|beside": "relative to, without tiling",
    r"ends in|lets? go of|leaves? (it |them )?alone": "raises, ignores, keeps",
    r"mend(s|ed|ing)?": "fix",
    r"nobody|somebody|who tiles": "no personified code",
}


@cache
def prose(file: Path) -> str:
    """Return the text of a page or configuration, or the comments and strings of a module, on one line."""
    text = file.read_text()
    if file.suffix == ".py":
        found = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = ("COMMENT", "STRING", "FSTRING_MIDDLE")
        text = " ".join(token.string.strip("# ") for token in found if tokenize.tok_name[token.type] in kinds)
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(("words", "instead"), WORDS.items())
def test_words_that_we_do_not_use(words: str, instead: str) -> None:
    """No page, comment, docstring or message has a word of our own where the field has another."""
    pattern = re.compile(rf"(?<![\w-])({words})(?![\w-])", 0 if "RAM" in words else re.IGNORECASE)
    texts = [(file.relative_to(ROOT), prose(file)) for file in FILES]
    found = [f"{file}: {text[m.start() - 30 : m.end() + 30]}" for file, text in texts for m in pattern.finditer(text)]
    assert not found, "\n".join([f"write {instead!r} instead:", *found])
