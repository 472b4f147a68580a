"""What stands in the place of commands that documents name: it runs them with limits, or checks that what they name is
there.

Each is a line of shell that calls :func:`main` with its name and arguments.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.docs.warm import request

ROOT = Path(__file__).parent.parent.parent
WARM = "LT_TILED_WARM"
"""The environment variable with the address of the warm process."""


def _pip(*args: str) -> int:
    """``pip install``: each requirement is installed, each extra defined, each file there."""
    assert args[0] == "install", f"pip {args[0]}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rest = list(args[1:])
    while rest:
        word = rest.pop(0)
        if word in ("-c", "-r"):
            assert Path(rest.pop(0)).is_file(), word
        elif not word.startswith("-"):
            match = re.fullmatch(r"(\.|[\w.-]+?)(?:\[([\w,-]+)\])?", word)
            assert match is not None, word
            asked = set(match[2].split(",")) if match[2] else set()
            if match[1] in (".", "lt-tiled"):
                assert asked <= extras.keys(), f"{word}: the extras are {', '.join(extras)}"
            importlib.metadata.version("lt-tiled" if match[1] == "." else match[1])
    return 0


_LIMITS = {
    "fit": ("limit_train_batches=1", "limit_val_batches=1", "val_check_interval=1.0", "max_epochs=1"),
    "validate": ("limit_val_batches=1",),
    "test": ("limit_test_batches=1",),
    "predict": ("limit_predict_batches=1",),
}


def _lt_tiled(*args: str) -> int:
    more: tuple[str, ...] = ()
    if args[0] in _LIMITS and not any("help" in arg or "print_config" in arg for arg in args):
        more = tuple(f"--trainer.{limit}" for limit in _LIMITS[args[0]])
    if args[0] == "fit" and "found.yaml" in args:
        more += ("--data.init_args.seq_len=4096",)  # what was found is too long for a test
    if "configs/plan/llama_8b.yaml" in args:
        more = ("--model.init_args.config.num_hidden_layers=2",)  # of 32: each takes a second
    elif "max-seq" in args:
        more = ("--memory=1GiB",)  # the search is shorter
    return request(os.environ[WARM], ["lt-tiled", *args, *more])


def _python(*args: str) -> int:
    if args[0] == "-m" and args[1] == "lt_tiled":
        return request(os.environ[WARM], ["python", *args])
    if args[0] == "-m":
        assert _is_module(args[1]), f"there is no module {args[1]}"
        return 0
    return request(os.environ[WARM], ["python", *args])


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def _pytest(*args: str) -> int:
    for path in (arg.partition("::")[0] for arg in args if not arg.startswith("-")):
        assert (ROOT / path).exists(), f"there is no {path}"
    return 0


def _bash(*args: str) -> int:
    """Its script is there; it is not run."""
    assert (ROOT / args[0]).is_file(), f"there is no {args[0]}"
    return 0


def _pre_commit(*args: str) -> int:
    assert (ROOT / ".pre-commit-config.yaml").is_file()
    return 0


def _sphinx_build(*args: str) -> int:
    assert (ROOT / "docs" / "conf.py").is_file()
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "pip": _pip,
    "lt-tiled": _lt_tiled,
    "python": _python,
    "pytest": _pytest,
    "bash": _bash,
    "pre-commit": _pre_commit,
    "sphinx-build": _sphinx_build,
}


def main() -> None:
    """Do what the process was called for."""
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
