"""Train models of released projects: ``python -m benchmarks.projects [PACKAGE ...]``, with ``--write`` into docs."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

from rich.console import Console

from benchmarks.__main__ import ROOT, write
from benchmarks.projects.compare import sheet
from benchmarks.projects.models import PROJECTS
from benchmarks.sheet import version_of
from lt_tiled._log import progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="packages to train models of; all of them by default")
    parser.add_argument("--write", action="store_true", help="write the table into docs/projects.md")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    for logger in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    chosen = [project for project in PROJECTS if not args.packages or project.package in args.packages]
    if not chosen:
        parser.error(f"{' '.join(args.packages)}: choose from {', '.join(dict.fromkeys(p.package for p in PROJECTS))}")
    with progress(f"Training {len(chosen)} models"):
        found = sheet(chosen)
    versions = {p.package: version_of(p.package) for p in chosen}
    found.notes = [f"{', '.join(f'{name} {version}' for name, version in versions.items())}."]
    Console(width=None if sys.stdout.isatty() else 200).print(found.table())
    if args.write:
        write(ROOT / "docs" / "projects.md", [found])


if __name__ == "__main__":
    main()
