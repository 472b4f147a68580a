"""The peak memory of a span of work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lt_tiled.memory import PeakMemory, available_memory

MIB, GIB = 2**20, 2**30


def test_cpu_peak_is_of_the_span() -> None:
    """On a CPU the peak holds what was alive at once since the reset, and not what was there before it."""
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(256 * MIB, dtype=torch.uint8)  # freed at once
    memory.reset()
    before = memory.read()
    torch.ones(128 * MIB, dtype=torch.uint8)
    assert 120 * MIB < memory.read() - before < 160 * MIB


@pytest.mark.parametrize("device", ["second", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_peak_of_an_accelerator_is_of_the_span(device: str) -> None:
    """On an accelerator the peak is what its allocator handed out at most since the reset."""
    memory = PeakMemory(torch.device(device, 0))
    held = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    memory.reset()
    torch.ones(128 * MIB, dtype=torch.uint8, device=device)
    assert memory.read() == torch.get_device_module(device).memory_allocated() + 128 * MIB
    assert memory.describe(memory.read()).endswith(f"(allocated on {device}:0)")
    del held


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
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
        ("0::/kubepods/pod1/c1\n", {".": 10}, V2, 8),  # the path of the host, in a container
        ("4:memory:/docker/a1\n0::/\n", {"memory/docker/a1": 10, "memory": 2**33}, V1, 8),
        ("4:cpu,memory:/a1/b2\n", {"memory/a1": 10, "memory/a1/b2": 20}, V1, 8),
        ("0::/a\n", {"a": 1}, V2, 0),  # uses more than the limit, for a moment
    ],
)
def test_memory_within_the_cgroups(
    tmp_path: Path, groups: str, limits: dict[str, int], names: tuple[str, str, str], free: int
) -> None:
    """The memory available is that within the limits of all cgroups above the process, of both versions."""
    assert available_memory(system(tmp_path, groups, limits, names)) == free * GIB
