"""The command line ``lt-tiled``. Many modules import :mod:`lt_tiled.cli.numbers`, so nothing is imported here."""

from __future__ import annotations


def main(args: list[str] | None = None) -> None:
    """Run the command line on ``args``, by default those of the process."""
    from lt_tiled.cli.commands import run

    run(args)
