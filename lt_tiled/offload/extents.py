"""The ranges in use of a file or of a slab of CPU memory.

NOTE [Ranges]
A range is free when no :class:`Extent` refers to it. Whatever writes or reads it holds its extent: the record of a
saved tensor, and each call that waits or runs. So wherever Ctrl-C or an error ends the code, a range that may still be
written to is in use, and no range is lost.
"""

from __future__ import annotations

import weakref
from itertools import pairwise

ALIGNMENT = 4096
"""Offsets and lengths are multiples of this, as ``O_DIRECT`` requires; it is also the size of a page."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extent:
    """One range, which is in use until the last reference to it is gone."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset, self.length = offset, length
        self.checksum = 0
        """That of the bytes that were written to it."""

    @property
    def end(self) -> int:
        return self.offset + self.length


class Extents:
    """The ranges in use of ``size`` bytes. Only ``size`` may change in another thread."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._taken: list[weakref.ref[Extent]] = []  # by offset; some are free again

    def take(self, nbytes: int, step: int = 2**62) -> Extent | None:
        """Return a free range of ``nbytes``, or a shorter one of a multiple of ``step`` bytes, or ``None``."""

        def fits(free: int) -> int:
            return nbytes if nbytes <= free else free // step * step

        end = self._end()
        if length := fits(self.size - end):  # so it is if ranges are freed in reverse order
            new = Extent(end, length)
            self._taken.append(weakref.ref(new))
            return new
        used = self._in_use()
        for left, right in pairwise([Extent(0, 0), *used]):
            if length := fits(right.offset - left.end):
                new = Extent(left.end, length)
                self._taken = [weakref.ref(extent) for extent in sorted([*used, new], key=lambda e: e.offset)]
                return new
        return None

    def free_at_end(self) -> int:
        """Return the number of free bytes at the end, which new bytes extend."""
        return self.size - self._end()

    @property
    def used(self) -> int:
        """The number of bytes in use."""
        return sum(extent.length for extent in self._in_use())

    def _end(self) -> int:
        while self._taken:
            if (last := self._taken[-1]()) is not None:
                return last.end
            self._taken.pop()
        return 0

    def _in_use(self) -> list[Extent]:
        return [extent for reference in self._taken if (extent := reference()) is not None]
