"""Tables of benchmarks, for the terminal, for Markdown and for JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

PACKAGES = {
    "lt_tiled": "lt-tiled",
    "DeepSpeed": "deepspeed",
    "axolotl": "axolotl",
    "Liger": "liger-kernel",
    "verl": "verl",
    "Unsloth": "unsloth-zoo",
    "HF kernels": "kernels",
}
"""The packages with tiled MLPs, by the names in tables."""

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Cell:
    """A figure with its verdict: good, bad, or ``None`` for no verdict."""

    text: str
    good: bool | None = None

    @property
    def verdict(self) -> str:
        """Return the text, with ✓ or ✗ if it has a verdict."""
        return self.text if self.good is None else f"{'✓' if self.good else '✗'} {self.text}".rstrip()


@dataclass
class Sheet:
    """One table. It is written between ``<!-- benchmark: NAME -->`` and ``<!-- end -->`` of the documentation."""

    name: str
    title: str
    headings: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences below the table."""

    def add(self, *cells: Cell | str) -> None:
        """Add a row. Plain strings are cells without a verdict."""
        self.rows.append([cell if isinstance(cell, Cell) else Cell(cell) for cell in cells])

    def table(self) -> Table:
        """Return the table for ``rich``, which a machine that only measures may lack."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            title=self.title, caption=escape(" ".join(self.notes)), caption_justify="left", title_justify="left"
        )
        for index, heading in enumerate(self.headings):
            table.add_column(heading, overflow="fold", justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*(_colored(cell) for cell in row))
        return table

    def markdown(self) -> str:
        """Return the table with its notes and without its title."""
        lines = [self.headings, ["---"] * len(self.headings), *([cell.verdict for cell in row] for row in self.rows)]
        table = "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines)
        return "\n\n".join([table, *([" ".join(self.notes)] if self.notes else [])])


def _colored(cell: Cell) -> str:
    from rich.markup import escape

    text = escape(cell.verdict)
    return text if cell.good is None else f"[{'green' if cell.good else 'red'}]{text}[/]"


def machine(device: torch.device) -> str:
    """Describe the machine."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{os.cpu_count()} {platform.machine()} CPU cores"
    )
    return f"{name}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"


def device_at_hand() -> torch.device:
    """Return the GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def reason(error: Exception) -> str:
    """Return the first line of an error, or its class name if it has no message."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def version_of(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def spread(values: list[float]) -> str:
    """Format the range of the values."""
    return f"{min(values):.2f} to {max(values):.2f}"
