"""Free ranges of an address space."""

from __future__ import annotations

import random

from lt_tiled.offload.extents import ALIGNMENT, Extents, aligned


def test_ranges_never_overlap_and_all_come_back() -> None:
    """Over thousands of random takes and drops no two ranges overlap, a range is refused only if there is no hole of
    its size, and in the end the whole space is one range again.
    """
    rng, extents, held = random.Random(0), Extents(256 * ALIGNMENT), []
    for _ in range(5000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
            continue
        need = aligned(rng.randrange(1, 20 * ALIGNMENT))
        new = extents.take(need)
        if new is None:
            ends = [0, *(other.end for other in held)]
            starts = [*(other.offset for other in held), extents.size]
            assert all(min(s for s in starts if s >= end) - end < need for end in ends)
            continue
        assert 0 <= new.offset <= extents.size - need
        assert all(new.end <= other.offset or other.end <= new.offset for other in held)
        held.append(new)
        assert extents.used == sum(extent.length for extent in held)
    held.clear()
    del new
    assert (extents.used, extents.free_at_end()) == (0, extents.size)
    assert extents.take(extents.size).offset == 0


def test_growth_joins_the_free_end() -> None:
    """A range may span what was free at the end and what was added behind it."""
    extents = Extents(4 * ALIGNMENT)
    first = extents.take(3 * ALIGNMENT)
    assert first.offset == 0
    assert extents.take(2 * ALIGNMENT) is None
    assert extents.free_at_end() == ALIGNMENT
    extents.size += ALIGNMENT
    assert extents.take(2 * ALIGNMENT).offset == 3 * ALIGNMENT
