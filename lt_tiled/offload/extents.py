"""The ranges in use of a file or of a slab of CPU memory.

NOTE [Ranges]
A range is free when nothing refers to its :class:`Extent`. Everything that writes or reads a range refers to its
extent: the record of a saved tensor, and each call that waits or runs. So wherever Ctrl-C or an error interrupts the
code, a range that may still be written stays in use, and no range is lost.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from lt_tiled.policies import MAX_BYTES

ALIGNMENT = 4096
"""Offsets and lengths are multiples of this, as ``O_DIRECT`` requires; it is also the size of a page."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Extent:
    """One range, which is in use until the last reference to it is gone."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Extents:
    """The ranges in use of ``size`` bytes."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._taken: list[weakref.ref[Extent]] = []  # sorted by offset; dead ones are free again

    def take(self, nbytes: int, step: int = MAX_BYTES) -> Extent | None:
        """Return a free range of ``nbytes``, or a shorter one whose length is a multiple of ``step``, or ``None``."""

        def fitting(free: int) -> int:
            return nbytes if nbytes <= free else free // step * step

        free = self.free_at_end()
        if length := fitting(free):  # always so if ranges are freed in reverse order
            new = Extent(self.size - free, length)
            self._taken.append(weakref.ref(new))
            return new
        used, start = self._in_use(), 0
        for index, extent in enumerate(used):
            if length := fitting(extent.offset - start):
                new = Extent(start, length)
                used.insert(index, new)
                self._taken = [weakref.ref(other) for other in used]
                return new
            start = extent.end
        return None

    def free_at_end(self) -> int:
        """Return the number of free bytes at the end, which new bytes extend."""
        while self._taken:
            if (last := self._taken[-1]()) is not None:
                return self.size - last.end
            self._taken.pop()
        return self.size

    @property
    def used(self) -> int:
        return sum(extent.length for extent in self._in_use())

    def _in_use(self) -> list[Extent]:
        return [extent for reference in self._taken if (extent := reference()) is not None]
