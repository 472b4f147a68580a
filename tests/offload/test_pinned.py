"""Slabs of CPU memory: how much of the budget can be used, and what the system refuses to pin or to allocate."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import pytest
import torch

from lt_tiled.memory import available_memory
from lt_tiled.offload import pinned
from lt_tiled.offload.pinned import SLAB, CPUMemory

GIB, CPU = 2**30, torch.device("cpu")
MIB = 4096
"""The bytes that are one MiB in the tests with small slabs."""
V2, V1 = (
    ("memory.max", "memory.current", "inactive_file"),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
SLURM = "slurm/uid_1/job_7/step_0"


def system(root: Path, groups: str, limits: dict[str, int], names: tuple[str, str, str]) -> Path:
    """Make the files of a system with 100 GiB free, whose cgroups have limits in GiB and use 3, 1 of it page cache."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit * GIB}\n" if limit else "max\n")
        (folder / names[1]).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {GIB}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "names", "free"),
    [
        ("", {}, V2, 100),
        ("0::/\n", {".": 10}, V2, 8),  # a container
        (f"0::/{SLURM}\n", {SLURM: 0, "slurm/uid_1/job_7": 10, "slurm": 40}, V2, 8),  # the limit is above it
        (f"0::/{SLURM}\n", {SLURM: 20, "slurm": 40}, V2, 18),
        ("0::/kubepods/pod1/c1\n", {".": 10}, V2, 8),  # the path of the host, in a container
        ("4:memory:/docker/a1\n0::/\n", {"memory/docker/a1": 10, "memory": 2**33}, V1, 8),
        ("4:cpu,memory:/a1/b2\n", {"memory/a1": 10, "memory/a1/b2": 20}, V1, 8),
        ("4:memory:/docker/a1\n", {"memory": 10}, V1, 8),
        ("5:cpu:/a1\n", {"a1": 1}, V1, 100),
        ("0::/a\n", {"a": 1}, V2, 0),  # uses more than the limit, for a moment
    ],
)
def test_memory_within_the_cgroups(
    tmp_path: Path, groups: str, limits: dict[str, int], names: tuple[str, str, str], free: int
) -> None:
    """The memory available is that within the limits of all cgroups above the process, of both versions."""
    assert available_memory(system(tmp_path, groups, limits, names)) == free * GIB


def test_refused_pinning_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be pinned is used unpinned, with one warning for all slabs and no further attempts."""
    asked: list[int] = []
    monkeypatch.setattr(pinned, "_pin_pages", lambda memory, device: asked.append(memory.nbytes))
    slabs = CPUMemory(2**30)
    slots = [slabs.take(200 * 2**20, torch.device("cuda", 0)) for _ in range(3)]
    assert all(slot is not None for slot in slots)
    assert len(asked) == 1
    assert caplog.text.count("refuses to pin CPU memory") == 1
    slabs.close()


def test_no_memory_left_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the system has less memory than the budget, the allocated slabs stay in use, with one warning."""
    slabs = CPUMemory(2**30)
    first = slabs.take(200 * 2**20, CPU)

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert [slabs.take(200 * 2**20, CPU) for _ in range(3)] == [None] * 3
    assert caplog.text.count("Cannot allocate 0.25 GiB of CPU memory") == 1
    del first
    assert slabs.take(200 * 2**20, CPU) is not None
    slabs.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> CPUMemory:
    """Slabs with a budget of 16 GiB, at a scale of 4 KiB for each MiB: slabs and pieces too."""
    monkeypatch.setattr(pinned, "SLAB", pinned.SLAB * MIB // 2**20)
    monkeypatch.setattr(pinned, "PIECE", pinned.PIECE * MIB // 2**20)
    return CPUMemory(16384 * MIB)


def test_block_inputs_of_any_size_fill_the_budget(small: CPUMemory) -> None:
    """Of a budget of 16 GiB at least 95 % can be used for block inputs of one size, from 60 to 600 MiB and then of a
    GiB, without allocating anew; slabs of 256 MiB with a range for each had room for 59 % with those of 150 MiB.
    """
    for mib in [*range(60, 601, 9), 1024, 64, 1024]:
        slots = []
        while (slot := small.take(mib * MIB - 100, CPU)) is not None:
            slots.append(slot)
        assert sum(memory.nbytes for slot in slots for memory in slot.memory) > 0.95 * small.budget, mib
        slots.clear()
    assert small.size == small.budget


def test_pieces_hold_what_was_stored(small: CPUMemory) -> None:
    """A tensor in several pieces comes back as it was, and no two tensors share bytes, when all sizes differ."""
    rng, kept = random.Random(1), []
    for number in range(120):
        while sum(t.nbytes for t, _ in kept) > 8192 * MIB or (kept and rng.random() < 0.3):
            tensor, slot = kept.pop(rng.randrange(len(kept)))
            back = torch.empty_like(tensor)
            small.copy("load", back, slot)
            assert torch.equal(back, tensor)
        tensor = torch.full((rng.randrange(1, 700 * MIB),), number % 251, dtype=torch.uint8)
        tensor[-1] = 252 + number % 3
        slot = small.take(tensor.nbytes, CPU)
        small.copy("store", tensor, slot)
        kept.append((tensor, slot))
        del slot
    assert max(len(slot.memory) for _, slot in kept) > 1


def test_slabs_have_the_size_they_were_asked_to_have() -> None:
    """Torch rounds pinned allocations up to powers of two: a budget of 300 MiB is 300 MiB here, in two slabs."""
    slabs = CPUMemory(300 * 2**20)
    slots = [slabs.take(50 * 2**20, CPU) for _ in range(5)]
    assert slabs.size == SLAB
    slots += [slabs.take(50 * 2**20, CPU) for _ in range(2)]  # the sixth begins in the first slab
    assert [slot is None for slot in slots] == [False] * 6 + [True]
    assert slabs.size == 300 * 2**20
    slabs.close()
