"""Slabs of CPU memory that the system refuses to pin or to allocate."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from lt_tiled.offload import pinned
from lt_tiled.offload.pinned import Slabs, available_memory

GIB = 2**30
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


def test_memory_of_this_system() -> None:
    """On this system it is some memory, and no more than there is."""
    assert 0 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_refused_pinning_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be pinned is used unpinned, with one warning for all slabs and no further attempts."""
    asked: list[int] = []
    monkeypatch.setattr(pinned, "_pin_pages", lambda memory: asked.append(memory.nbytes))
    slabs = Slabs(2**30)
    slots = [slabs.take(200 * 2**20, pin=True) for _ in range(3)]
    assert all(slot is not None for slot in slots)
    assert len(asked) == 1
    assert caplog.text.count("refuses to pin CPU memory") == 1
    slabs.close()


def test_no_memory_left_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the system has less memory than the budget, the allocated slabs stay in use, with one warning."""
    slabs = Slabs(2**30)
    first = slabs.take(200 * 2**20, pin=False)

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert [slabs.take(200 * 2**20, pin=False) for _ in range(3)] == [None] * 3
    assert caplog.text.count("Cannot allocate 0.25 GiB of CPU memory") == 1
    del first
    assert slabs.take(200 * 2**20, pin=False) is not None
    slabs.close()
