"""Free ranges of an address space."""

from __future__ import annotations

import random

from lt_tiled.offload.extents import ALIGNMENT, Extents, aligned


def test_ranges_never_overlap_and_all_come_back() -> None:
    """Over thousands of random takes and returns no two ranges overlap, and in the end the whole space is one range
    again.
    """
    rng, extents, held = random.Random(0), Extents(256 * ALIGNMENT), []
    for _ in range(5000):
        if held and rng.random() < 0.5:
            extents.give_back(*held.pop(rng.randrange(len(held))))
            continue
        need = aligned(rng.randrange(1, 20 * ALIGNMENT))
        offset = extents.take(need)
        if offset is None:
            continue
        assert 0 <= offset <= extents.size - need
        assert all(offset + need <= o or o + n <= offset for o, n in held)
        held.append((offset, need))
        assert extents.used == sum(n for _, n in held)
    for offset, need in held:
        extents.give_back(offset, need)
    assert (extents.used, extents.tail) == (0, extents.size)
    assert extents.take(extents.size) == 0


def test_growth_joins_the_free_end() -> None:
    """A range may span what was free at the end and what was added behind it."""
    extents = Extents(4 * ALIGNMENT)
    assert extents.take(3 * ALIGNMENT) == 0
    assert extents.take(2 * ALIGNMENT) is None
    assert extents.tail == ALIGNMENT
    extents.grow(ALIGNMENT)
    assert extents.take(2 * ALIGNMENT) == 3 * ALIGNMENT
