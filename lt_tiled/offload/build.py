"""An offloader from a policy."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.spill import SpillFile
from lt_tiled.offload.tiers import DiskTier, RamTier
from lt_tiled.policies import Checkpointing, parse_bytes


def build_offloader(policy: Checkpointing, ranks_per_node: int | None = None) -> Offloader:
    """Open the tiers that the policy names.

    Args:
        policy: A policy with ``offload`` set.
        ranks_per_node: Processes that share a node's budgets; by default what the launcher says, else all ranks there
            are.

    Raises:
        OffloadDiskFullError: If the disk has no room for ``disk_budget``.
        OffloadError: If the directory cannot be used.
    """
    assert policy.offload is not None
    ranks = ranks_per_node or _ranks_per_node()
    ram = disk = None
    if "cpu" in policy.offload:
        budget = available_ram() // 2 if policy.cpu_budget is None else parse_bytes(policy.cpu_budget, "cpu_budget")
        ram = RamTier(budget // ranks)
    if "disk" in policy.offload:
        budget_or_none = None if policy.disk_budget is None else parse_bytes(policy.disk_budget, "disk_budget") // ranks
        directory = policy.directory or tempfile.gettempdir()
        disk = DiskTier(SpillFile(directory, budget_or_none, direct=policy.direct_io, checksum=policy.checksum))
    return Offloader(
        ram=ram,
        disk=disk,
        prefetch=policy.prefetch,
        keep_last=policy.keep_last,
        min_bytes=parse_bytes(policy.min_bytes, "min_bytes"),
        compress=policy.compress,
    )


def available_ram() -> int:
    """Bytes of RAM that the system, or the container that this is, could give now."""
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no cgroup v2, or no limit: "max"
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        available = min(available, max(left, 0))
    return available


def _ranks_per_node() -> int:
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
