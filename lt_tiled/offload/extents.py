"""The free ranges of a file or of a slab of CPU memory."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 4096
"""Offsets and lengths are multiples of this, as ``O_DIRECT`` requires; it is also the size of a page."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extents:
    """The free ranges of ``size`` bytes: first fit, and merged when freed. Not thread-safe."""

    def __init__(self, size: int = 0) -> None:
        self.size = 0
        self.used = 0
        self._free: list[tuple[int, int]] = []  # (offset, length) by offset, never adjacent
        self.grow(size)

    def grow(self, nbytes: int) -> None:
        """Add bytes at the end."""
        if nbytes:
            self.size += nbytes
            self._insert(self.size - nbytes, nbytes)

    def take(self, nbytes: int) -> int | None:
        """Take a range of ``nbytes``, a multiple of the alignment; return its offset, or ``None`` if there is none."""
        for index, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self.used += nbytes
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        self.used -= nbytes
        self._insert(offset, nbytes)

    @property
    def tail(self) -> int:
        """The number of free bytes at the end, which new bytes extend."""
        return self._free[-1][1] if self._free and sum(self._free[-1]) == self.size else 0

    def _insert(self, offset: int, nbytes: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        self._free.insert(index, (offset, nbytes))
        for left in (index, index - 1):  # merge with the next range, then with the previous one
            if 0 <= left < len(self._free) - 1 and sum(self._free[left]) == self._free[left + 1][0]:
                (start, _), last = self._free[left], self._free[left + 1]
                self._free[left : left + 2] = [(start, sum(last) - start)]
