"""The command line, ``lt-tiled``. The modules of the package use :mod:`lt_tiled.cli.numbers`, so this imports none."""

from __future__ import annotations

from typing import Any


def main(args: Any = None) -> None:
    """Run the command line on ``args``, by default those of the process."""
    from lt_tiled.cli.commands import run

    run(args)
