"""Which ranges of an address space (a file, a slab of RAM) are free."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 4096
"""Offsets and lengths are multiples of this: what ``O_DIRECT`` asks for on every common disk, and a page of RAM."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extents:
    """Free ranges of ``size`` bytes, first fit, joined again when they are freed. Not safe for threads by itself."""

    def __init__(self, size: int = 0) -> None:
        self.size = 0
        self.used = 0
        self._free: list[tuple[int, int]] = []  # (offset, length) by offset, never adjacent
        self.grow(size)

    def grow(self, nbytes: int) -> None:
        """Add bytes behind the end."""
        if nbytes:
            self.size += nbytes
            self._insert(self.size - nbytes, nbytes)

    def take(self, nbytes: int) -> int | None:
        """The offset of a range of ``nbytes`` (a multiple of the alignment) that is taken from now on, or ``None``."""
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
        """Free bytes at the very end: what growth can join."""
        return self._free[-1][1] if self._free and sum(self._free[-1]) == self.size else 0

    def _insert(self, offset: int, nbytes: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        start, end, low, high = offset, offset + nbytes, index, index
        if index and sum(self._free[index - 1]) == offset:
            low, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            high, end = index + 1, sum(self._free[index])
        self._free[low:high] = [(start, end - start)]
