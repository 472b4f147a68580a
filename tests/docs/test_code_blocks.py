"""Every code block of the README and of the pages runs, as its reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.conftest import Shell
from tests.docs.documents import DOCUMENTS, ROOT, RUN, SHOWN, Block, blocks, having, name_of, script

# Fails with the document's own line, and shows the command.
_STRICT = """set -euo pipefail; trap 'echo "line $LINENO of the document: $BASH_COMMAND" >&2' ERR;"""


def files_of(document: Path) -> None:
    """Put the files that a document shows into this folder; beside them those of a checkout, but for pages that do
    without.
    """
    named = [block for block in blocks(document) if block.file is not None]
    assert len(named) == len({block.file for block in named}), "two blocks with one name"
    for block in named:
        assert block.file is not None
        Path(block.file).write_text(script([block]) if block.file.endswith(".py") else block.code)
    if "start" not in document.parts:
        for name in ("configs", "constraints.txt", "pyproject.toml"):
            Path(name).symlink_to(ROOT / name)


def simplified(line: str) -> str:
    """A line without its numbers, the widths of its columns and its ends."""
    line = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", line)
    return re.sub(r"[━─]+", "─", re.sub(r"\s+", " ", line)).strip()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_languages(document: Path) -> None:
    """Every code block says its language, and it is one whose blocks are run, or one of output."""
    found = {block.line: block.language for block in blocks(document) if block.file is None}
    assert not {line: language for line, language in found.items() if language not in RUN + SHOWN}


@pytest.mark.parametrize("document", having("python"), ids=name_of)
def test_python(document: Path, shell: Shell) -> None:
    """The Python blocks of a document run, one after the other, as one script."""
    files_of(document)
    program = Path(document.stem + ".py")
    program.write_text(script(b for b in blocks(document) if b.language == "python" and b.file is None))
    Path("run.sh").write_text(f"python {program}\n")
    shell(Path("run.sh"))


@pytest.mark.parametrize("document", having("sh"), ids=name_of)
def test_commands(document: Path, shell: Shell) -> None:
    """The commands of a document run, on the files that it shows, and print what it says that they print, but for
    numbers.
    """
    files_of(document)
    program = Path("run.sh")
    lines = script(b for b in blocks(document) if b.language == "sh").splitlines()
    program.write_text("\n".join([_STRICT, *lines[1:], ""]))
    printed = {simplified(line) for line in shell(program).splitlines()}
    expected = [simplified(line) for b in blocks(document) if b.output for line in b.code.splitlines()]
    missing = [line for line in expected if line not in ("", "...") and not any(line in other for other in printed)]
    assert not missing, "\n".join(["not printed:", *missing, "but:", *sorted(printed)])


def _unnamed(document: Path) -> list[Block]:
    return [b for b in blocks(document) if b.language == "yaml" and b.file is None]


@pytest.mark.parametrize("document", having("yaml"), ids=name_of)
def test_yaml(document: Path, shell: Shell) -> None:
    """A YAML block that is no file for the commands of its document is a configuration that the command line
    understands.
    """
    files_of(document)
    lines = []
    for block in _unnamed(document):
        Path(f"line_{block.line}.yaml").write_text(block.code)
        lines.append(f"lt-tiled fit --config line_{block.line}.yaml --print_config > /dev/null")
    Path("run.sh").write_text("\n".join([_STRICT, *lines, ""]))
    shell(Path("run.sh"))
