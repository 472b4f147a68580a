"""Every code block of the README and of the pages runs as its reader would run it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, Block, blocks, name_of
from tests.processes import LIMIT, Forked

pytestmark = pytest.mark.slow

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", "TERM": "dumb"}
LIMITS = ("limit_train_batches=1", "limit_val_batches=1", "val_check_interval=1.0", "max_epochs=1")


def _exists(words: list[str]) -> bool:
    """Whether what a command of this repository names is in the repository. The command does not run."""
    if words[0] not in ("python", "pip", "pytest", "bash", "sphinx-build"):
        return False
    if words[0] == "python" and words[1] != "-m":
        return False
    if words[0] == "python":
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists() or (ROOT / words[2]).is_dir(), words[2]
    for word in words[1:]:
        if "/" in word and not word.startswith("-"):
            assert (ROOT / word.partition("::")[0]).exists() or word.startswith("build/"), word
    for extra in re.findall(r"(?:lt-tiled|\.)\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), extra
    return True


def run(command: str, more: str, printed: Path) -> None:
    """Run one command in this folder, and append what it prints."""
    words = shlex.split(command, comments=True)
    if not words or _exists(words):
        return
    if words[0] in ("python", "lt-tiled"):
        if "fit" in words and not any("help" in word or "print_config" in word for word in words):
            words += [f"--trainer.{limit}" for limit in LIMITS]
            if "--config configs/" in command and "seq_len" not in command:
                words += ["--data.init_args.seq_len=2048"]  # the least that "auto" tiles
        code = Forked(*words, *shlex.split(more), printed=printed, cwd=Path.cwd(), **ENVIRONMENT).finish()
    else:
        with printed.open("a") as file:
            code = subprocess.run(command, shell=True, stdout=file, stderr=file, timeout=LIMIT).returncode
    assert code == 0, f"{command}\n{printed.read_text()}"


def _simplified(line: str) -> str:
    """Return a line without its numbers and without padding."""
    line = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", line)
    return re.sub(r"[━─]+", "─", re.sub(r"\s+", " ", line)).strip()


def _script(parts: list[Block]) -> str:
    """Join blocks of Python, each on its own lines of the document, so that a traceback names them."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.table("README|docs/(settings|coming_from|models|benchmarks)")
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d)], ids=name_of)
def test_code_blocks(document: Path) -> None:
    """The commands, the Python and the configurations of a document run, and print what it says that they print."""
    if "start" not in document.parts:  # those begin in an empty folder
        for name in ("configs", "constraints.txt", "pyproject.toml"):
            Path(name).symlink_to(ROOT / name)
    found = blocks(document)
    assert {block.language for block in found} <= {"python", "sh", "yaml", "text"}
    for block in found:
        if block.direction == "file":
            Path(block.argument).write_text(block.code)
    printed = Path("printed.txt")
    printed.touch()
    if python := [block for block in found if block.runs and block.language == "python"]:
        Path("blocks.py").write_text(_script(python))
        run("python blocks.py", "", printed)
    for block in found:
        if block.runs and block.language == "yaml":
            Path("block.yaml").write_text(block.code)
            run("lt-tiled fit --config block.yaml --print_config", "", printed)
        if block.runs and block.language == "sh":
            for line in block.code.splitlines():
                for command in line.split(" && "):
                    run(command, block.argument, printed)
    lines = {_simplified(line) for line in printed.read_text().splitlines()}
    expected = [_simplified(line) for b in found if b.direction == "output" for line in b.code.splitlines()]
    missing = [line for line in expected if line and not any(line in other for other in lines)]
    assert not missing, "\n".join(["not printed:", *missing, "but:", *sorted(lines)])
