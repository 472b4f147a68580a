"""The house rules that a script can count, with the budgets of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def budgets() -> dict[str, int]:
    """Return the rows of the table of budgets: what is counted, and the most that it may be."""
    _, _, section = CONTRIBUTING.read_text().partition("## Budgets\n")
    rows = [line.strip("|").split("|") for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return {name.strip(): int(most) for name, most in rows[2:]}


@cache
def figures() -> dict[str, int]:
    """Return what stands in the repository now, under the names of the table."""
    package = [(path, path.read_text()) for path in python_files("lt_tiled")]
    trees = {path: ast.parse(text) for path, text in package}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lengths = [len(text.splitlines()) for _, text in package]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def per_1000_lines(count: int) -> int:
        return round(1000 * count / sum(lengths))

    return {
        "lines of `lt_tiled/`": sum(lengths),
        "lines of `tests/`": lines_of("tests"),
        "lines of `benchmarks/`": lines_of("benchmarks"),
        "lines of a file in `lt_tiled/`": max(lengths),
        "lines of a function": max(node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno),
        "comprehensions in 1,000 lines": per_1000_lines(sum(map(is_comprehension, nodes))),
        "unpackings in 1,000 lines": per_1000_lines(sum(map(unpackings, nodes))),
        "if-expressions in 1,000 lines": per_1000_lines(sum(isinstance(node, ast.IfExp) for node in nodes)),
        "`a, b = x, y` in 1,000 lines": per_1000_lines(sum(map(is_parallel, nodes))),
        "modules in an import circle": len(in_circles(imports(trees))),
    }


def python_files(folder: str) -> list[Path]:
    """Return the Python files of a folder that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def lines_of(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in python_files(folder))


def is_comprehension(node: ast.AST) -> bool:
    return isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)


def unpackings(node: ast.AST) -> int:
    """Count ``*x`` and ``**x`` in calls and displays, and assignments to a tuple."""
    if isinstance(node, ast.Dict):
        return sum(key is None for key in node.keys)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Tuple) for target in node.targets)
    return isinstance(node, ast.Starred) or (isinstance(node, ast.keyword) and node.arg is None)


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns several values at once: ``a, b = x, y``."""
    return isinstance(node, ast.Assign) and unpackings(node) > 0 and isinstance(node.value, ast.Tuple)


def imports(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Return which modules each module imports, wherever the import stands: in functions and type checks, too."""
    found: dict[str, set[str]] = {module_name(path): set() for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            else:
                continue
            found[module_name(path)].update(name for name in names if name in found and name != module_name(path))
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def in_circles(imported: dict[str, set[str]]) -> set[str]:
    """Return the modules that import themselves through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        queue = [start]
        while queue:
            for name in imported[queue.pop()] - seen:
                seen.add(name)
                queue.append(name)
        return seen

    return {name for name in imported if name in reached(name)}


@pytest.mark.parametrize("what", budgets())
def test_budget(what: str) -> None:
    """The repository stays within each budget that CONTRIBUTING.md sets."""
    assert figures()[what] <= budgets()[what], f"{what}: make something else shorter, or remove what nobody needs"


def test_all_budgets() -> None:
    """The table of CONTRIBUTING.md names what is counted, and nothing else."""
    assert budgets().keys() == figures().keys()


def test_circles() -> None:
    """A circle is found through any number of modules, and a chain is none."""
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {"a", "b", "c"}
